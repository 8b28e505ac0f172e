"""Events of the replicas that Serve runs, as its controller sees them: new ones, lost ones, changed targets, and what a
deployment had in each minute in which that has changed.

Invariant: one process writes them, so that each is there once, however many routers there are.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from serve_app.names import ENGINE_PREFIX, ROUTER
from serve_app.system import EventKind, EventWriter, event

logger = logging.getLogger("ray.serve")

SNAPSHOT_S = 60.0
NAMES_SHOWN = 10


class ScalingEvents:
    """The events of one application.

    Args:
        writer: of this process; None: nothing is kept, but the log.
    """

    def __init__(self, writer: EventWriter | None = None) -> None:
        self._writer = writer
        self._running: dict[str, frozenset[str]] = {}
        self._snapshots: dict[str, Mapping[str, Any]] = {}
        self._snapshot_due = 0.0

    def on_deployments(self, found: Mapping[str, tuple[Iterable[Hashable], int]]) -> None:
        """Serve has these deployments: it runs these replicas of each, and wants so many."""
        self._running = {name: running for name, running in self._running.items() if name in found}
        for deployment, (replicas, target) in found.items():
            self.on_replicas(deployment, replicas, target)

    def on_replicas(self, deployment: str, replicas: Iterable[Hashable], target: int) -> None:
        """Serve runs these replicas of a deployment, and wants so many."""
        running = frozenset(str(getattr(one, "unique_id", one)) for one in replicas)
        before = self._running.get(deployment, running)  # a new controller has seen none come
        self._running[deployment] = running
        if running == before:
            return
        lost = sorted(before - running)
        new = sorted(running - before)
        subject = subject_of(deployment)
        details = {"lost": lost[:NAMES_SHOWN], "new": new[:NAMES_SHOWN], "running": len(running), "target": target}
        extra = event(EventKind.HEALTH, subject, **details)
        names = " ".join((lost or new)[:NAMES_SHOWN])
        figures = (deployment, len(running), target, names)
        if not lost:
            logger.info("Deployment %s has %d of %d replicas; new are %s", *figures, extra=extra)
        elif len(running) < target:
            logger.warning("Deployment %s lost replicas and has %d of %d now: %s", *figures, extra=extra)
        else:
            logger.info("Deployment %s has %d of %d replicas; gone are %s", *figures, extra=extra)

    def on_target(self, deployment: str, before: int, target: int, reason: str) -> None:
        """The number of replicas that Serve wants has changed."""
        logger.info(
            "Deployment %s changed its target from %d to %d replicas: %s",
            *(deployment, before, target, reason),
            extra=event(EventKind.SCALING, subject_of(deployment), before=before, target=target, reason=reason),
        )

    def is_snapshot_due(self, now: float) -> bool:
        """Whether `snapshot` would write what has changed."""
        return now >= self._snapshot_due and self._writer is not None

    def snapshot(self, snapshots: Mapping[str, Mapping[str, Any]], now: float, wall: float) -> None:
        """Write what each deployment has, if it is time to and something has changed. `wall`: seconds since 1970."""
        if not self.is_snapshot_due(now) or self._writer is None:
            return
        self._snapshot_due = now + SNAPSHOT_S
        for deployment, figures in snapshots.items():
            if self._snapshots.get(deployment) == figures:
                continue
            named = {"kind": EventKind.SNAPSHOT.value, "subject": subject_of(deployment), "level": "info"}
            self._writer.write({"at": wall, **named, "message": str(figures.get("reason", "")), "details": figures})
        self._snapshots = dict(snapshots)


def subject_of(deployment: str) -> str:
    """The model of an engine deployment, or `router`."""
    return "router" if deployment == ROUTER else deployment.removeprefix(ENGINE_PREFIX)
