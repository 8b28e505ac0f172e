"""Files, batches and their rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "batch_files",
        sa.Column("file_id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False, index=True),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("filename", sa.String(256), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("size", sa.BigInteger),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, index=True),
        sa.Column("deleted_at", sa.Double),
    )
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False, index=True),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False, index=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("in_progress_at", sa.Double),
        sa.Column("finalizing_at", sa.Double),
        sa.Column("completed_at", sa.Double),
        sa.Column("failed_at", sa.Double),
        sa.Column("expired_at", sa.Double),
        sa.Column("cancelling_at", sa.Double),
        sa.Column("cancelled_at", sa.Double),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("errors", sa.Text, nullable=False),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("completed", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
    )
    _add_rows()


def _add_rows() -> None:
    op.create_table(
        "batch_rows",
        sa.Column("batch_id", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("row_offset", sa.BigInteger, nullable=False),
        sa.Column("row_length", sa.Integer, nullable=False),
        sa.Column("custom_id", sa.String(512), nullable=False),
        sa.Column("model", sa.String(512), nullable=False),
        sa.Column("prefix", sa.BigInteger, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("worker", sa.String(128)),
        sa.Column("claim", sa.String(32)),
        sa.Column("leased_until", sa.Double, nullable=False),
        sa.Column("is_failed", sa.Boolean),
        sa.Column("line", sa.Text),
    )
    _index_rows()


def _index_rows() -> None:
    waiting = sa.text("is_failed IS NULL")
    leased = sa.text("worker IS NOT NULL")
    columns = ["batch_id", "model", "prefix", "number"]
    op.create_index("batch_rows_claims", "batch_rows", columns, sqlite_where=waiting, postgresql_where=waiting)
    op.create_index("batch_rows_worker", "batch_rows", ["worker"], sqlite_where=leased, postgresql_where=leased)
    op.create_index("batch_rows_results", "batch_rows", ["batch_id", "is_failed", "number"])


def downgrade() -> None:
    for table in ("batch_rows", "batches", "batch_files"):
        op.drop_table(table)
