"""What can be killed on a running stack, and whether it is there again.

Invariant: of routers and engines one is killed only while Serve has all of them, so that the other one stands.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil
import psycopg
import requests

from benchmarks.batch_crash.plan import Shape, Victim
from benchmarks.batch_crash.watch import ReplicaWatch
from benchmarks.common.processes import title_of
from benchmarks.common.scaling_stack import Stage
from serve_app.names import ENGINE_PREFIX, ROUTER

ACTORS = {Victim.QUOTA_ACTOR: "ray::GpuMemoryQuota", Victim.STORE: "ray::StoreOwner"}
WORKER_MARK = "batch"  # in the name of the deployment, in whatever case


def victim_of(deployment: str) -> Victim | None:
    """What kind a deployment's replicas are."""
    if deployment == ROUTER:
        return Victim.ROUTER
    if deployment.startswith(ENGINE_PREFIX):
        return Victim.ENGINE
    return Victim.WORKER if WORKER_MARK in deployment.lower() else None


def by_victim(running: Mapping[str, Mapping[str, int]]) -> dict[Victim, list[int]]:
    """The processes of the running replicas by kind."""
    found: dict[Victim, list[int]] = {Victim.WORKER: [], Victim.ROUTER: [], Victim.ENGINE: []}
    for deployment, replicas in running.items():
        victim = victim_of(deployment)
        if victim is not None:
            found[victim] += replicas.values()
    return found


@dataclass(slots=True)
class Victims:
    """The processes of one stack.

    Args:
        store_url: of PostgreSQL; None: the store is the SQLite file of its actor.
    """

    stage: Stage
    watch: ReplicaWatch
    shape: Shape
    draw: random.Random
    store_url: str | None = None
    _killed: dict[Victim, set[int]] = field(default_factory=lambda: {victim: set() for victim in Victim})
    _killed_at: dict[Victim, float] = field(default_factory=dict)

    def expected(self, victim: Victim) -> int:
        return {Victim.ROUTER: self.shape.routers, Victim.ENGINE: self.shape.engines}.get(victim, 1)

    def is_back(self, victim: Victim) -> bool:
        """Whether all of this kind are there, none of them one that was killed, and answer where they can be asked."""
        if victim is Victim.STORE and self.store_url is not None:
            return self._answers("/admin/keys")
        if victim in ACTORS:
            found = self._actors(victim)
            path = "/admin/quota" if victim is Victim.QUOTA_ACTOR else "/admin/keys"
            return len(found) == 1 and self._answers(path)
        found = by_victim(self.watch.running(self._killed_at.get(victim, 0.0)))[victim]
        alive = [pid for pid in found if pid not in self._killed[victim] and psutil.pid_exists(pid)]
        return len(alive) == self.expected(victim)

    def kill(self, victim: Victim) -> str | None:
        """Kill one of this kind; what was killed, or None: there was none."""
        if victim is Victim.STORE and self.store_url is not None:
            ended = terminate_backends(self.store_url)
            return f"{ended} connections" if ended else None
        if victim in ACTORS:
            found = self._actors(victim)
        else:
            running = by_victim(self.watch.running())[victim]
            found = [pid for pid in running if pid not in self._killed[victim]]
        while found:
            pid = found.pop(self.draw.randrange(len(found)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._killed[victim].add(pid)
                self._killed_at[victim] = time.monotonic()
                return f"process {pid}"
        return None

    def _actors(self, victim: Victim) -> list[int]:
        found = [pid for pid in self.stage.cluster.pids() if title_of(pid).startswith(ACTORS[victim])]
        return [pid for pid in found if pid not in self._killed[victim]]

    def _answers(self, path: str) -> bool:
        """Whether a route answers that asks the actor or the store."""
        try:
            answer = self.stage.get(path)
        except requests.RequestException:
            return False
        return answer.status_code == 200 and not (path == "/admin/quota" and answer.json().get("recovering"))


def terminate_backends(url: str) -> int:
    """End every connection to the database of this URL but our own; how many."""
    with psycopg.connect(url.replace("postgresql+psycopg:", "postgresql:", 1), autocommit=True) as connection:
        rows = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchall()
    return len(rows)
