"""Drains an engine replica or a node of a running cluster, and follows it to its end.

A replica is drained by the quota actor; it ends, and Serve starts another one. A node is drained by Ray: Serve starts
other replicas where there is room and then stops those of the node, and the quota actor gives the node's end as a
deadline to its engines. Requests that are left at a deadline are moved by their routers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.cluster.local import driver, status
from serve_app.core.memory import DrainRequest
from serve_app.core.times import MOVE_S
from serve_app.errors import LeaseNotFound, ServeAppError, Unavailable
from serve_app.names import ENGINE_PREFIX

# Until replicas of a draining node end without a replacement: a model loads within that time from a local cache.
REPLACE_S = 120.0
END_S = 30.0  # for an engine to end, beyond all deadlines
POLL_S = 0.5

Tell = Callable[[list[dict[str, Any]]], None]  # receives the rows of `_rows` whenever they have changed


def drain_replica(replica: str, within_s: float | None, tell: Tell) -> list[dict[str, Any]]:
    """Drain an engine replica; returns its row once it has ended and Serve has seen that: none if the quota actor
    has started anew and its first row was never seen.

    Raises:
        LeaseNotFound: the quota actor does not know it. Unavailable: no actor, or it has not ended in time.
    """
    shown: list[dict[str, Any]] = []
    limit_s = END_S
    is_requested = False
    silent_since = begun = time.monotonic()
    while True:
        with contextlib.suppress(Unavailable):  # the actor or Serve's controller starts anew, or stands still
            figures = driver.ask_quota("figures")
            reported = [one for one in figures["drains"] if one["replica"] == replica]
            if not (is_requested and reported):  # the actor may also have ended before the engine knew of it
                left_s = None if within_s is None else max(0.0, begun + within_s - time.monotonic())
                try:
                    driver.ask_quota("exchange", DrainRequest(replica, left_s))
                    is_requested = True
                except LeaseNotFound:
                    if not (is_requested or figures["recovering"]):
                        raise
            silent_since = time.monotonic() if reported else silent_since
            rows = _merged(reported, shown)
            if rows != shown:
                limit_s = max(limit_s, time.monotonic() - begun + rows[0]["left_s"] + MOVE_S + END_S)
                shown = rows
                tell(rows)
            is_there = status.has_replica(driver.details(driver.ANSWER_S), replica)
            if is_requested and not is_there and all(one["ended"] for one in reported):
                return shown if reported else [one | {"ended": True, "final": False} for one in shown]
        if time.monotonic() > min(begun + limit_s, silent_since + END_S):
            has_ended = any(one["ended"] for one in shown)
            why = "has ended, and Serve has not seen it" if has_ended else "drains and has not ended"
            raise Unavailable(f"{replica} {why} in time", code="drain_failed")
        time.sleep(POLL_S)  # bound: `limit_s`


def drain_node(node_id: str, within_s: float | None, tell: Tell) -> list[dict[str, Any]]:
    """Drain a node: all its replicas end, and within the time also its HAProxy, which Serve lets run for 30 s at least.
    Returns the rows of its engines at the end.

    Args:
        within_s: None: each replica is replaced elsewhere first, where that is possible within REPLACE_S, and has then
            its model's `drain_s`.

    Raises:
        Unavailable: Ray refuses, replicas are left, or Serve's controller does not answer.
    """
    found = driver.details(driver.ANSWER_S)
    limit_s = REPLACE_S + status.longest_drain_s(found, node_id) if within_s is None else within_s + MOVE_S
    driver.announce_end(node_id, limit_s)
    deadline = time.monotonic() + limit_s
    engines: set[str] = set()
    drained: set[str] = set()
    shown: list[dict[str, Any]] = []
    while True:
        present = _engines_on(found, node_id)
        engines |= present.keys()
        for replica in [name for name, state in present.items() if state == "STOPPING" and name not in drained]:
            with contextlib.suppress(ServeAppError):  # it may have ended; this only makes its progress known
                driver.ask_quota("exchange", DrainRequest(replica))
                drained.add(replica)
        with contextlib.suppress(Unavailable):
            rows = _merged([one for one in driver.ask_quota("figures")["drains"] if one["replica"] in engines], shown)
            if rows != shown:
                shown = rows
                tell(rows)
        left = status.replicas_on(found, node_id)
        is_late = time.monotonic() > deadline
        if not left and (is_late or node_id not in found["proxies"]):
            return shown
        if time.monotonic() > deadline + END_S:
            raise Unavailable(f"{len(left)} replicas are left there: {', '.join(left)}", code="drain_failed")
        time.sleep(POLL_S)  # bound: `deadline`
        with contextlib.suppress(Unavailable):  # Serve's controller starts anew
            found = driver.details(driver.ANSWER_S)


def _merged(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with what was known before: an actor that has started anew begins with zeros, or knows no row."""
    known = {one["replica"]: one for one in before}
    for row in rows:
        was = known.get(row["replica"], row)
        known[row["replica"]] = row | {what: max(row[what], was[what]) for what in ("finished", "moved")}
    return list(known.values())


def _engines_on(details: Mapping[str, Any], node_id: str) -> dict[str, str]:
    """The engine replicas on a node, and Serve's state of each."""
    return {
        replica["replica_id"]: status.enum_value(replica["state"])
        for name, one in status.deployments_of(details).items()
        if name.startswith(ENGINE_PREFIX)
        for replica in one["replicas"]
        if replica.get("node_id") == node_id
    }
