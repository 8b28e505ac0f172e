"""The part of the use whose requests asked for a name that is no model's own; all use before reads as asked for by the
model's name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
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
        "named_usage",
        sa.Column("day", sa.String(10), primary_key=True),
        sa.Column("key_id", sa.String(64), primary_key=True, index=True),
        sa.Column("tenant", sa.String(64), primary_key=True, index=True),
        sa.Column("model", sa.String(512), primary_key=True),
        sa.Column("asked_model", sa.String(512), primary_key=True, index=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in counts),
    )


def downgrade() -> None:
    op.drop_table("named_usage")
