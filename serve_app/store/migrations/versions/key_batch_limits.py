"""The limits of the rows of a key's batches."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("batch_limits", sa.Text))


def downgrade() -> None:
    op.drop_column("api_keys", "batch_limits")
