"""The bytes that an upload reserves while it arrives."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batch_files", sa.Column("reserved", sa.BigInteger))
    op.add_column("batch_files", sa.Column("reserved_until", sa.Double))


def downgrade() -> None:
    op.drop_column("batch_files", "reserved_until")
    op.drop_column("batch_files", "reserved")
