"""The tables of the store, as the newest migration leaves them (a test compares the two)."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, LargeBinary, MetaData, String, Table, Text

METADATA = MetaData()

API_KEYS = Table(
    "api_keys",
    METADATA,
    Column("key_id", String(64), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("digest", LargeBinary(32), nullable=False, unique=True),
    Column("previous_digest", LargeBinary(32)),
    Column("previous_until", Double),
    Column("max_class", Integer, nullable=False),
    Column("default_class", Integer, nullable=False),
    Column("admin", Boolean, nullable=False),
    Column("metrics", Boolean, nullable=False),
    Column("models", Text),  # JSON
    Column("limits", Text),  # JSON
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("version", BigInteger, nullable=False, index=True),
)

# Counts the changes of a table's rows. A writer holds its row until it commits, so versions become visible in order.
VERSIONS = Table(
    "versions",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("version", BigInteger, nullable=False),
)
KEYS_VERSION = "api_keys"

USAGE = Table(
    "usage",
    METADATA,
    Column("day", String(10), primary_key=True),
    Column("key_id", String(64), primary_key=True, index=True),
    Column("tenant", String(64), primary_key=True, index=True),
    Column("model", String(512), primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("kv_token_ms", BigInteger, nullable=False),
    Column("wait_ms", BigInteger, nullable=False),
    Column("cost_micro", BigInteger, nullable=False),
    Column("unsettled", BigInteger, nullable=False),
)

USAGE_SOURCES = Table(
    "usage_sources",
    METADATA,
    Column("source", String(128), primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("in_flight", Text, nullable=False),  # JSON
    Column("ended", Boolean, nullable=False),  # its in_flight is counted as unsettled
    Column("seen_at", Double, nullable=False),
)
