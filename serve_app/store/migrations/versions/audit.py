"""Who changed what."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("entry_id", sa.String(32), nullable=False, unique=True),
        sa.Column("at", sa.Double, nullable=False, index=True),
        sa.Column("author", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("target", sa.String(512), nullable=False),
        sa.Column("digest_before", sa.String(64)),
        sa.Column("digest_after", sa.String(64)),
        sa.Column("details", sa.Text, nullable=False),
    )
    versions = sa.table("versions", sa.column("name", sa.String), sa.column("version", sa.BigInteger))
    op.bulk_insert(versions, [{"name": "audit", "version": 0}])


def downgrade() -> None:
    op.execute("DELETE FROM versions WHERE name = 'audit'")
    op.drop_table("audit")
