"""When the content of a file was removed, and which batches read it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batch_files", sa.Column("removed_at", sa.Double))
    op.create_index("ix_batch_files_removed_at", "batch_files", ["removed_at"])
    present = sa.text("removed_at IS NULL")
    op.create_index(
        "batch_files_present", "batch_files", ["created_at"], sqlite_where=present, postgresql_where=present
    )
    op.create_index("ix_batches_input_file_id", "batches", ["input_file_id"])


def downgrade() -> None:
    op.drop_index("ix_batches_input_file_id", "batches")
    op.drop_index("batch_files_present", "batch_files")
    op.drop_index("ix_batch_files_removed_at", "batch_files")
    op.drop_column("batch_files", "removed_at")
