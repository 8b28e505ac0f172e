"""The store: keys, use, batches, responses; durable. SQLite behind one actor on the head node, or PostgreSQL, direct.

In come records of keys, batches of use, rows and their results, turns of conversations; out come what changed, who
changed it, sums, rows to run, and turns. It decides nothing about a request.
"""

from serve_app.store.audit import MACHINE, AuditAction, AuditEntry, Author, unrecorded
from serve_app.store.background_store import BackgroundStore
from serve_app.store.batch_store import BatchStore
from serve_app.store.owner import default_file
from serve_app.store.records import KeyRecord, StoreFigures, UsageQuery, is_key_id, new_key_id
from serve_app.store.store import Store

__all__ = [
    "MACHINE",
    "AuditAction",
    "AuditEntry",
    "Author",
    "BackgroundStore",
    "BatchStore",
    "KeyRecord",
    "Store",
    "StoreFigures",
    "UsageQuery",
    "default_file",
    "is_key_id",
    "new_key_id",
    "unrecorded",
]
