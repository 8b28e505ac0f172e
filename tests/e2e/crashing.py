"""The ledger beside what Serve says is there, the load that runs through a crash, and the blows themselves."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.common.processes import titled
from tests.e2e.changing import CHANGED_S, POLL_S, STEADY, Load, Place
from tests.e2e.stack import Stack
from tests.waiting import wait_until

ACTOR = "ray::GpuMemoryQuota"
CLIENT_PAIRS = 2
SERVING = ("RUNNING", "UPDATING")  # Serve's states; a router gets its settings, and another configuration, as UPDATING


@contextmanager
def load(place: Place, model_name: str = STEADY) -> Iterator[list[Load]]:
    """Requests to one model without a pause; whatever failed of them is there after the block."""
    running = [Load(place.endpoint, model_name) for _ in range(CLIENT_PAIRS)]
    try:
        wait_until(lambda: all(one.answered for one in running), CHANGED_S, "the load has begun")
        yield running
        answered = [one.answered for one in running]
        wait_until(
            lambda: all(one.answered > n for one, n in zip(running, answered, strict=True)), CHANGED_S, "it goes on"
        )
    finally:
        for thread in running:
            thread.stop()


def failed(running: list[Load]) -> list[str]:
    return [what for one in running for what in one.failed]


def actor(place: Place | Stack) -> int | None:
    """The quota actor's process; Ray adds the method that runs there to its title."""
    assert place.cluster is not None
    found = titled(place.cluster.pids(), ACTOR)
    return found[0] if len(found) == 1 else None


def difference(place: Place, *, idle: bool) -> str:
    """What the ledger has otherwise than Serve; nothing: they are the same.

    Args:
        idle: nothing runs, nor has anything waited just now: routers return their shares of a contended model, one
            after another, and ask for them again once it is calm.
    """
    figures = place.quota()
    state = place.status()
    if figures is None or figures["recovering"]:
        return f"no figures: {figures}"
    replicas = {one["id"] for each in state["models"] for one in each["replicas"] if one["state"] in SERVING}
    # one that starts, too: it has no share yet, and would be without one a moment later
    routers = {one["id"] for one in state["routers"] if one["state"] in (*SERVING, "STARTING")}
    engines = {one["replica"]: one for one in figures["engines"]}
    wrong = []
    if set(engines) != replicas or len(figures["engines"]) != len(replicas):
        wrong.append(f"engines {sorted(engines)}, replicas {sorted(replicas)}")
    for name, engine in engines.items():
        if engine["state"] != "committed":
            wrong.append(f"{name} is {engine['state']}")
        if set(engine["kv_tokens_by_router"]) != routers:
            wrong.append(f"{name}: shares of {sorted(engine['kv_tokens_by_router'])}, routers {sorted(routers)}")
        if sum(engine["kv_tokens_by_router"].values()) > engine["kv_tokens"]:
            wrong.append(f"{name}: more shared than there is: {engine}")
        if idle and engine["kv_tokens_used"]:
            wrong.append(f"{name}: {engine['kv_tokens_used']} tokens in use")
    contended = [one["model"] for one in figures["queues"] if one["contended"]]
    if idle and contended:
        wrong.append(f"{contended} are contended")
    if figures["granted_bytes"] != sum(one["granted_bytes"] for one in figures["engines"]):
        wrong.append(f"{figures['granted_bytes']} bytes granted on devices")
    return "; ".join(wrong)


def settled(place: Place, bound_s: float = CHANGED_S, *, idle: bool = True) -> float:
    """Wait until ledger and reality are the same; returns the wall's seconds that took."""
    look = functools.partial(difference, place, idle=idle)
    return wait_until(look, bound_s, "ledger and reality are the same", wanted="", poll_s=POLL_S).wall_s


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def known(place: Place) -> set[str]:
    """Engines in the ledger; what it said last, while it is away."""
    figures = place.quota()
    return set() if figures is None else {one["replica"] for one in figures["engines"]}


@contextmanager
def unless_gone() -> Iterator[None]:
    """A process that has ended meanwhile is no news here."""
    try:
        yield
    except ProcessLookupError:
        return
