"""The quota actor: one named actor that grants the GPU memory of the cluster.

Decides: nothing; `core.quota` does. The actor has the clock, the store and the state of nodes and processes.
In: memory reports of engines, queue messages of routers. Out: grants, queue messages, the report of `serve-app quota`.
Never: answers before what it has granted is stored.
"""

from serve_app.quota import actor, kv_store
from serve_app.quota.actor import GpuMemoryQuota
from serve_app.quota.client import QuotaActor

__all__ = ["GpuMemoryQuota", "QuotaActor", "actor", "kv_store"]
