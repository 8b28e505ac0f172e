"""The tables of the store, as the newest migration leaves them (a test compares the two)."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    false,
    text,
)

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
    Column("deploy", Boolean, nullable=False, server_default=false()),
    Column("models", Text),  # JSON
    Column("limits", Text),  # JSON
    Column("batch_limits", Text),  # JSON
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
AUDIT_NUMBER = "audit"

AUDIT = Table(
    "audit",
    METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("entry_id", String(32), nullable=False, unique=True),
    Column("at", Double, nullable=False, index=True),
    Column("author", String(64), nullable=False),  # the id of a key, or the machine
    Column("tenant", String(64), nullable=False),
    Column("action", String(32), nullable=False),
    Column("target", String(512), nullable=False),
    Column("digest_before", String(64)),
    Column("digest_after", String(64)),
    Column("details", Text, nullable=False),  # JSON
)

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

# The part of `usage` whose requests asked for a name that is no model's own. A table of its own: the release
# before adds to `usage` by its primary key.
NAMED_USAGE = Table(
    "named_usage",
    METADATA,
    Column("day", String(10), primary_key=True),
    Column("key_id", String(64), primary_key=True, index=True),
    Column("tenant", String(64), primary_key=True, index=True),
    Column("model", String(512), primary_key=True),
    Column("asked_model", String(512), primary_key=True, index=True),
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

BATCH_FILES = Table(
    "batch_files",
    METADATA,
    Column("file_id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False, index=True),
    Column("key_id", String(64), nullable=False),
    Column("filename", String(256), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("size", BigInteger),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, index=True),
    Column("deleted_at", Double),
    Column("removed_at", Double, index=True),  # its content is gone
    Column("reserved", BigInteger),  # bytes of its tenant, while its content arrives
    Column("reserved_until", Double),
)

BATCHES = Table(
    "batches",
    METADATA,
    Column("batch_id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False, index=True),
    Column("key_id", String(64), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(64), nullable=False, index=True),
    Column("completion_window", String(16), nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("created_at", Double, nullable=False, index=True),
    Column("expires_at", Double, nullable=False),
    Column("in_progress_at", Double),
    Column("finalizing_at", Double),
    Column("completed_at", Double),
    Column("failed_at", Double),
    Column("expired_at", Double),
    Column("cancelling_at", Double),
    Column("cancelled_at", Double),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("metadata", Text, nullable=False),  # JSON
    Column("errors", Text, nullable=False),  # JSON
    Column("total", Integer, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("worker", String(128)),  # that brings it to its next status
    Column("leased_until", Double),
    Column("request_key", LargeBinary(16)),  # stands for the tenant and the Idempotency-Key that it was made with
    Column("request_fingerprint", LargeBinary(16)),  # of what was asked for
    Index("batches_request_key", "request_key", unique=True),
)

BATCH_ROWS = Table(
    "batch_rows",
    METADATA,
    Column("batch_id", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("row_offset", BigInteger, nullable=False),
    Column("row_length", Integer, nullable=False),
    Column("custom_id", String(512), nullable=False),
    Column("model", String(512), nullable=False),
    Column("prefix", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("worker", String(128)),
    Column("claim", String(32)),  # by which it has the row: a claim repeated gets the same rows
    Column("leased_until", Double, nullable=False),  # 0: nobody has it
    Column("is_failed", Boolean),  # NULL: it has no result
    Column("line", Text),  # the last one: SQLite reads a row from its beginning
    Index("batch_rows_results", "batch_id", "is_failed", "number"),
    # Conditions have no parameters: SQLite takes such an index only for what it can prove before it knows any.
    Index(
        "batch_rows_claims",
        "batch_id",
        "model",
        "prefix",
        "number",
        sqlite_where=text("is_failed IS NULL"),
        postgresql_where=text("is_failed IS NULL"),
    ),
    Index(
        "batch_rows_worker",
        "worker",
        sqlite_where=text("worker IS NOT NULL"),
        postgresql_where=text("worker IS NOT NULL"),
    ),
)

RESPONSES = Table(
    "responses",
    METADATA,
    Column("response_id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("previous_id", String(64)),
    Column("created_at", Double, nullable=False),
    Column("used_at", Double, nullable=False, index=True),  # when the newest turn that continues it was made
    Column("expires_at", Double, nullable=False, index=True),
    Column("size", BigInteger, nullable=False),  # bytes that count for the tenant
    Column("body", Text, nullable=False),  # JSON, without the output
    # of one that is made in the background
    Column("job", Text),  # JSON; NULL: it has ended
    Column("key_id", String(64)),
    Column("attempts", Integer),
    Column("worker", String(128)),
    Column("claim", String(32)),  # by which it has the job: a claim repeated gets the same jobs
    Column("leased_until", Double),  # 0: nobody has it; without a worker: nobody may have it before
    Column("cancel_at", Double),
    Column("deadline_at", Double),  # it starts before, or fails
    Column("request_fingerprint", LargeBinary(16)),  # of what was asked for with its Idempotency-Key
    # with all columns that are asked for: a row has the texts of a whole request
    Index("responses_tenant", "tenant", "expires_at", "created_at", "response_id", "size"),
    Index(
        "responses_jobs",
        "tenant",
        "created_at",
        "response_id",
        "leased_until",
        "expires_at",
        "worker",
        "claim",
        "deadline_at",
        sqlite_where=text("job IS NOT NULL"),
        postgresql_where=text("job IS NOT NULL"),
    ),
)

RESPONSE_ITEMS = Table(
    "response_items",
    METADATA,
    Column("response_id", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("tenant", String(64), nullable=False),
    Column("item_id", String(64), nullable=False),
    Column("is_output", Boolean, nullable=False),
    Column("body", Text, nullable=False),  # JSON
    Index("response_items_ids", "tenant", "item_id"),
)

RESPONSE_EVENTS = Table(
    "response_events",
    METADATA,
    Column("response_id", String(64), primary_key=True),
    Column("first", Integer, primary_key=True, autoincrement=False),  # number of the first event
    Column("last", Integer, nullable=False),
    Column("body", Text, nullable=False),  # as they are sent
)
