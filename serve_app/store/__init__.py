"""The store: keys and use, durable. SQLite behind one actor on the head node, or PostgreSQL, direct.

In come records of keys and batches of use, out come what changed and sums. It decides nothing about a request.
"""

from serve_app.store.owner import OwnerCalls, default_file, restart_as
from serve_app.store.records import KeyRecord, UsageQuery, is_key_id, new_key_id
from serve_app.store.store import Store

__all__ = ["KeyRecord", "OwnerCalls", "Store", "UsageQuery", "default_file", "is_key_id", "new_key_id", "restart_as"]
