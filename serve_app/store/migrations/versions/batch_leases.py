"""Who changes a batch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("worker", sa.String(128)))
    op.add_column("batches", sa.Column("leased_until", sa.Double))


def downgrade() -> None:
    for column in ("worker", "leased_until"):
        op.drop_column("batches", column)
