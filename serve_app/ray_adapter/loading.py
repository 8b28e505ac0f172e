"""What Serve's next controller finds of a replica that is still loading.

It asks each replica that its predecessor has left whether its constructor has ended, and replaces those where it has
not: minutes of loading, for nothing. Asked once more to initialize, a replica only waits for the first time to end.
"""

from __future__ import annotations

from ray._private import worker


def keep_while_loading() -> None:
    """Have the next controller wait for this replica. For a constructor, which has its rank and configuration."""
    process = worker.global_worker
    if (replica := process.actors.get(process.actor_id)) is not None:  # None: no actor of a cluster
        replica._replica_impl._user_callable_initialized = True
