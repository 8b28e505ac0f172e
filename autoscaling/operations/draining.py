"""Follows the drain of an engine replica or a node to its end, in whatever way the application is reached: as a driver
of its cluster (`ray_drains`) or by HTTP.

A replica is drained by the quota actor; it ends, and Serve starts another one. A node is drained by Ray: Serve starts
other replicas where there is room and then stops those of the node, and the quota actor gives the node's end as a
deadline to its engines. Requests that are left at a deadline are moved by their routers.

Invariant: only the quota actor and Ray keep a drain, so whoever asks them next can go on to follow it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from autoscaling.operations.drain_target import DrainTarget
from serve_app.core.times import MOVE_S
from serve_app.errors import LeaseNotFound, ServeAppError, Unavailable

END_S = 30.0  # for an engine to end, beyond all deadlines
POLL_S = 0.5

Tell = Callable[[list[dict[str, Any]]], None]  # receives the rows of a drain whenever they have changed


@dataclass(frozen=True, slots=True)
class DrainLook:
    """How far a drain is.

    Args:
        rows: of the quota actor's `drains`; None: it does not answer.
        is_recovering: the actor has started anew, and may not know all engines yet.
        engines: the engine replicas of the target that Serve counts, with its state of each; None: its controller does
            not answer.
        left: the deployments of all replicas on a node, one entry a replica.
        has_proxy: HAProxy runs on the node.
    """

    rows: list[dict[str, Any]] | None
    is_recovering: bool = False
    engines: dict[str, str] | None = None
    left: list[str] = field(default_factory=list)
    has_proxy: bool = False


class DrainControl(Protocol):
    """The drains of one application."""

    def drain_replica(self, replica: str, within_s: float | None) -> None:
        """Tell the quota actor. Raises LeaseNotFound: it does not know it. Unavailable."""

    def drain_node(self, node_id: str, within_s: float | None) -> float:
        """Tell Ray; returns the seconds until the node's end. Raises Unavailable."""

    def look(self, target: DrainTarget) -> DrainLook:
        """How far it is."""


def follow(drains: DrainControl, target: DrainTarget, within_s: float | None, tell: Tell) -> list[dict[str, Any]]:
    """Drain it; returns the rows of its engines at the end. Raises as `follow_replica` and `follow_node`."""
    kind = follow_node if target.is_node else follow_replica
    return kind(drains, target.target_id, within_s, tell)


def follow_replica(drains: DrainControl, replica: str, within_s: float | None, tell: Tell) -> list[dict[str, Any]]:
    """Drain an engine replica; returns its row once it has ended and Serve has seen that: none if the quota actor
    has started anew and its first row was never seen.

    Raises:
        LeaseNotFound: the quota actor does not know it. Unavailable: no actor, or it has not ended in time.
    """
    target = DrainTarget(replica, is_node=False)
    shown: list[dict[str, Any]] = []
    limit_s = END_S
    is_requested = False
    silent_since = begun = time.monotonic()
    while True:
        look = drains.look(target)
        if look.rows is not None:
            was_requested = is_requested
            reported = [one for one in look.rows if one["replica"] == replica]
            if not (is_requested and reported):  # the actor may also have ended before the engine knew of it
                left_s = None if within_s is None else max(0.0, begun + within_s - time.monotonic())
                is_requested |= _is_taken(drains, replica, left_s, is_known=is_requested or look.is_recovering)
            silent_since = time.monotonic() if reported else silent_since
            rows = _merged(reported, shown)
            if rows != shown:
                limit_s = max(limit_s, time.monotonic() - begun + rows[0]["left_s"] + MOVE_S + END_S)
                shown = rows
                tell(rows)
            has_left = look.engines is not None and replica not in look.engines
            if was_requested and has_left and all(one["ended"] for one in reported):
                return shown if reported else [one | {"ended": True, "final": False} for one in shown]
        if time.monotonic() > min(begun + limit_s, silent_since + END_S):
            has_ended = any(one["ended"] for one in shown)
            why = "has ended, and Serve has not seen it" if has_ended else "drains and has not ended"
            raise Unavailable(f"{replica} {why} in time", code="drain_failed")
        time.sleep(POLL_S)  # bound: `limit_s`


def _is_taken(drains: DrainControl, replica: str, within_s: float | None, *, is_known: bool) -> bool:
    """Whether the quota actor has taken the request. Raises LeaseNotFound, unless `is_known`: then the actor has just
    started anew."""
    try:
        drains.drain_replica(replica, within_s)
    except LeaseNotFound:
        if not is_known:
            raise
        return False
    except Unavailable:
        return False
    return True


def follow_node(drains: DrainControl, node_id: str, within_s: float | None, tell: Tell) -> list[dict[str, Any]]:
    """Drain a node: all its replicas end, and within the time also its HAProxy, which Serve lets run for 30 s at least.
    Returns the rows of its engines at the end.

    Args:
        within_s: None: each replica is replaced elsewhere first, where that is possible within REPLACE_S, and has then
            its model's `drain_s`.

    Raises:
        Unavailable: Ray refuses, replicas are left, or Serve's controller does not answer.
    """
    target = DrainTarget(node_id, is_node=True)
    deadline = time.monotonic() + drains.drain_node(node_id, within_s)
    engines: set[str] = set()
    drained: set[str] = set()
    shown: list[dict[str, Any]] = []
    left: list[str] | None = None
    while True:
        look = drains.look(target)
        present = look.engines or {}
        engines |= present.keys()
        for replica in [name for name, state in present.items() if state == "STOPPING" and name not in drained]:
            with contextlib.suppress(ServeAppError):  # it may have ended; this only makes its progress known
                drains.drain_replica(replica, None)
                drained.add(replica)
        rows = _merged([one for one in look.rows or () if one["replica"] in engines], shown)
        if rows != shown:
            shown = rows
            tell(rows)
        left = left if look.engines is None else look.left
        is_late = time.monotonic() > deadline
        if left == [] and (is_late or not look.has_proxy):
            return shown
        if time.monotonic() > deadline + END_S:
            count = "replicas may be" if left is None else f"{len(left)} replicas are"
            raise Unavailable(f"{count} left there: {', '.join(left or ())}", code="drain_failed")
        time.sleep(POLL_S)  # bound: `deadline`


def _merged(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with what was known before: an actor that has started anew begins with zeros, or knows no row."""
    known = {one["replica"]: one for one in before}
    for row in rows:
        was = known.get(row["replica"], row)
        known[row["replica"]] = row | {what: max(row[what], was[what]) for what in ("finished", "moved")}
    return list(known.values())
