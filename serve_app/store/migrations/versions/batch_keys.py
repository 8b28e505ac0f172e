"""Which Idempotency-Key a batch was made with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("request_key", "request_fingerprint"):
        op.add_column("batches", sa.Column(name, sa.LargeBinary(16)))
    op.create_index("batches_request_key", "batches", ["request_key"], unique=True)


def downgrade() -> None:
    op.drop_index("batches_request_key", "batches")
    for name in ("request_fingerprint", "request_key"):
        op.drop_column("batches", name)
