"""Keys, their version, usage, and its sources."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _add_keys()
    _add_usage()


def _add_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False, unique=True),
        sa.Column("previous_digest", sa.LargeBinary(32)),
        sa.Column("previous_until", sa.Double),
        sa.Column("max_class", sa.Integer, nullable=False),
        sa.Column("default_class", sa.Integer, nullable=False),
        sa.Column("admin", sa.Boolean, nullable=False),
        sa.Column("metrics", sa.Boolean, nullable=False),
        sa.Column("models", sa.Text),
        sa.Column("limits", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
        sa.Column("version", sa.BigInteger, nullable=False, index=True),
    )
    versions = op.create_table(
        "versions",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(versions, [{"name": "api_keys", "version": 0}])


def _add_usage() -> None:
    counts = (
        "requests",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "kv_token_ms",
        "wait_ms",
        "cost_micro",
        "unsettled",
    )
    op.create_table(
        "usage",
        sa.Column("day", sa.String(10), primary_key=True),
        sa.Column("key_id", sa.String(64), primary_key=True, index=True),
        sa.Column("tenant", sa.String(64), primary_key=True, index=True),
        sa.Column("model", sa.String(512), primary_key=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in counts),
    )
    op.create_table(
        "usage_sources",
        sa.Column("source", sa.String(128), primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("in_flight", sa.Text, nullable=False),
        sa.Column("ended", sa.Boolean, nullable=False),
        sa.Column("seen_at", sa.Double, nullable=False),
    )


def downgrade() -> None:
    for table in ("usage_sources", "usage", "versions", "api_keys"):
        op.drop_table(table)
