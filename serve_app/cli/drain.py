"""`serve-app drain`: take an engine replica or a node out of service, and follow it to its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rich.console import Console

from autoscaling.operations import DrainTarget, draining
from serve_app.cli.endpoint import Endpoint
from serve_app.cli.layout import Listing, show_unrecorded
from serve_app.cli.operators import fetch_soon
from serve_app.cluster.local import answers
from serve_app.errors import LeaseNotFound, NotFound, ServeAppError, Unavailable

PATH = "/admin/drains"
GONE = ("replica_not_found", NotFound.code)  # of a replica that the quota actor, or Serve, does not know
SILENT_S = 3600.0  # nothing is heard while nothing changes; the driver itself bounds the drain
COLUMNS = ("replica", "model", "state", "running", "finished", "moved", "seconds left")


class HttpDrains:
    """The drains of an application, through its endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._limits_s: dict[str, float] = {}  # of nodes that `begin` drains, by id: until their end
        self.unrecorded = ""  # why the audit record lacks the drain

    def begin(self, name: str, within_s: float | None) -> dict[str, Any]:
        """The drain of what `name` stands for: `id`, `is_node`, `limit_s` (of a node: until its end).

        Raises:
            ServeAppError: nothing is called so, or no answer.
        """
        body = {"name": name, "within_s": within_s}
        begun: dict[str, Any] = fetch_soon(self._endpoint, "POST", PATH, json=body)
        self.unrecorded = self.unrecorded or begun["unrecorded"]
        if begun["is_node"]:
            self._limits_s[begun["id"]] = begun["limit_s"]
        return begun

    def drain_replica(self, replica: str, within_s: float | None) -> None:
        try:
            self.begin(replica, within_s)
        except ServeAppError as error:
            if error.code in GONE:
                raise LeaseNotFound(error.message) from None
            raise

    def drain_node(self, node_id: str, within_s: float | None) -> float:
        if node_id not in self._limits_s:
            self.begin(node_id, within_s)
        return self._limits_s[node_id]

    def look(self, target: DrainTarget) -> draining.DrainLook:
        """Of a router that does not answer, nothing: another one is asked the next time."""
        try:
            found = fetch_soon(self._endpoint, "GET", f"{PATH}/{quote(target.target_id, safe='')}")
        except Unavailable:
            return draining.DrainLook(None)
        return draining.DrainLook(**{one.name: found[one.name] for one in dataclasses.fields(draining.DrainLook)})


def drain_by_http(name: str, within_s: float | None, endpoint: Endpoint, *, console: Console | None) -> dict[str, Any]:
    """As `drain`, through the endpoint. Raises ServeAppError."""
    drains = HttpDrains(endpoint)
    begun = drains.begin(name, within_s)
    target = DrainTarget(begun["id"], begun["is_node"])
    shown: list[dict[str, Any]] = []

    def tell(rows: list[dict[str, Any]]) -> None:
        if console is not None:
            show(rows, shown, console)
        shown[:] = rows

    rows = draining.follow(drains, target, within_s, tell)
    return {"target": target.target_id, "rows": rows, "unrecorded": drains.unrecorded}


def drain(
    name: str, within_s: float | None, environment: Mapping[str, str], *, console: Console | None
) -> dict[str, Any]:
    """Drain it through Ray; returns its `target` (the whole id) and the `rows` of its engines at the end.

    Args:
        console: gets what changes meanwhile; None: nobody wants it.

    Raises:
        Unavailable: no cluster answers, nothing is called so, or it has not ended in time.
    """
    order = {"do": "drain", "environment": dict(environment), "name": name, "within_s": within_s}
    shown: list[dict[str, Any]] = []
    for answer in answers(order, SILENT_S):
        if "target" in answer:
            return answer
        if console is not None:
            show(answer["rows"], shown, console)
        shown = answer["rows"]
    raise Unavailable("the process that drains it has ended", code="drain_failed")


def show(rows: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the engines whose requests have changed; the seconds alone do not count."""
    known = {_record(row)[:-1] for row in before}
    changed = [record for record in map(_record, rows) if record[:-1] not in known]
    Listing(console).table("drain", COLUMNS, changed)


def show_end(found: Mapping[str, Any], console: Console) -> None:
    """Print what has become of the requests."""
    show_unrecorded(found, console)
    rows = found["rows"]
    if not rows:
        text = f"{found['target']} is drained; no engine of it has reported what became of its requests"
        Listing(console).say(text, ("drained", found["target"], *"----"))
        return
    finished, moved = (sum(row[what] for row in rows) for what in ("finished", "moved"))
    cut, unknown = (sum(row["running"] for row in rows if row["final"] is is_final) for is_final in (True, False))
    parts = [f"{finished} finished", f"{moved} moved to other replicas"]
    parts += [f"{cut} cut: their routers did not answer"] if cut else []
    parts += [f"{unknown} ran when it was last heard of: it ended without a word"] if unknown else []
    record = ("drained", found["target"], str(finished), str(moved), str(cut), str(unknown))
    Listing(console).say(f"{found['target']} is drained; of its requests {', '.join(parts)}", record)


def _record(row: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (str(row[what]) for what in ("running", "finished", "moved"))
    state = "ended" if row["ended"] else "drains"
    return (row["replica"], row["model"], state, *counts, "" if row["ended"] else f"{row['left_s']:.0f}")
