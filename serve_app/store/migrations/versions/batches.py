"""Batches, their files, and their rows with the results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("file_id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("deleted_at", sa.Double),
    )
    op.create_index("files_by_age", "files", ["tenant", "created_at", "file_id"])
    kept = sa.text("deleted_at IS NULL")
    op.create_index("files_kept", "files", ["expires_at"], sqlite_where=kept, postgresql_where=kept)
    _create_batches()
    op.create_table(
        "batch_rows",
        sa.Column("batch_id", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("length", sa.BigInteger, nullable=False),
        sa.Column("custom_id", sa.String(512), nullable=False),
        sa.Column("model", sa.String(512), nullable=False),
        sa.Column("prefix", sa.BigInteger, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("worker", sa.String(256)),
        sa.Column("claim", sa.String(64)),
        sa.Column("lease_until", sa.Double),
        sa.Column("is_failed", sa.Boolean),
        sa.Column("line", sa.Text),
    )
    op.create_index("batch_rows_results", "batch_rows", ["batch_id", "is_failed", "number"])
    unfinished = sa.text("is_failed IS NULL")
    columns = ["batch_id", "model", "prefix", "number"]
    op.create_index(
        "batch_rows_unfinished", "batch_rows", columns, sqlite_where=unfinished, postgresql_where=unfinished
    )
    leased = sa.text("worker IS NOT NULL")
    op.create_index("batch_rows_leased", "batch_rows", ["worker"], sqlite_where=leased, postgresql_where=leased)


def _create_batches() -> None:
    ends = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at")
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False, index=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        *(sa.Column(name, sa.Double) for name in (*ends, "cancelled_at")),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("errors", sa.Text, nullable=False),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("completed", sa.BigInteger, nullable=False),
        sa.Column("failed", sa.BigInteger, nullable=False),
    )
    op.create_index("batches_by_age", "batches", ["tenant", "created_at", "batch_id"])


def downgrade() -> None:
    for table in ("batch_rows", "batches", "files"):
        op.drop_table(table)
