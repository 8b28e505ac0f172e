"""Short ways to make a line and to send it events, for the tests of admission."""

from __future__ import annotations

from typing import Any

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Action, Admission, Arrival, Grant, QueuePolicy
from serve_app.types import RequestClass

LOW, NORMAL, HIGH, CRITICAL = RequestClass


def admission(max_queued: int = 100, max_wait_s: float = 60.0, **replicas: int) -> Admission:
    made = Admission(QueuePolicy(max_queued, max_wait_s, no_replica_wait_s=25.0))
    for replica, slots in replicas.items():
        set_replica(made, replica, slots, 0.0)
    return made


def arrival(name: str, cls: RequestClass = NORMAL, slots: int = 1, **more: Any) -> Arrival:
    return Arrival(name, cls, "tenant", slots, **more)


def of(tenant: str, name: str, cls: RequestClass = NORMAL, prompt: int = 10, output: int = 50, **more: Any) -> Arrival:
    return Arrival(name, cls, tenant, cost_tokens=prompt + output, prompt_tokens=prompt, **more)


def arrive(queue: Admission, *names: str, cls: RequestClass = NORMAL, slots: int = 1, now: float = 0.0) -> list[Action]:
    return [action for name in names for action in queue.on_arrive(arrival(name, cls, slots), now)]


def state(queue: Admission, now: float = 0.0) -> tuple[Any, ...]:
    """What later events can see of the line: its figures, what waits and runs, and every replica's size and use."""
    replicas = {
        name: (one.slots, one.slots_left, one.kv_tokens, one.kv_left, sorted(one.running))
        for name, one in queue.capacity.replicas.items()
    }
    return queue.snapshot(now), queue.waiting, list(queue.scheduler.running), replicas


def where(actions: list[Action]) -> dict[str, str]:
    """Granted requests and their replicas, or refused ones and the reasons."""
    return {a.request_id: a.replica_id if isinstance(a, Grant) else a.reason.value for a in actions}
