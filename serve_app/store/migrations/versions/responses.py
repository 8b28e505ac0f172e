"""Responses that are kept, their items, and the events of those that are made in the background."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("response_id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("previous_id", sa.String(64)),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("used_at", sa.Double, nullable=False, index=True),
        sa.Column("expires_at", sa.Double, nullable=False, index=True),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("job", sa.Text),
        sa.Column("key_id", sa.String(64)),
        sa.Column("attempts", sa.Integer),
        sa.Column("worker", sa.String(128)),
        sa.Column("claim", sa.String(32)),
        sa.Column("leased_until", sa.Double),
        sa.Column("cancel_at", sa.Double),
        sa.Column("deadline_at", sa.Double),
        sa.Column("request_fingerprint", sa.LargeBinary(16)),
    )
    runs = sa.text("job IS NOT NULL")
    claims = ["tenant", "created_at", "response_id", "leased_until", "expires_at", "worker", "claim", "deadline_at"]
    op.create_index("responses_jobs", "responses", claims, sqlite_where=runs, postgresql_where=runs)
    of_tenant = ["tenant", "expires_at", "created_at", "response_id", "size"]
    op.create_index("responses_tenant", "responses", of_tenant)
    op.create_table(
        "response_items",
        sa.Column("response_id", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("item_id", sa.String(64), nullable=False),
        sa.Column("is_output", sa.Boolean, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_index("response_items_ids", "response_items", ["tenant", "item_id"])
    op.create_table(
        "response_events",
        sa.Column("response_id", sa.String(64), primary_key=True),
        sa.Column("first", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("last", sa.Integer, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )


def downgrade() -> None:
    for table in ("response_events", "response_items", "responses"):
        op.drop_table(table)
