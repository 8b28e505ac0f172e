"""Engines that fail, and what a router makes of it: for the tests of ejection and probes."""

from __future__ import annotations

from typing import Any

from serve_app.core.routing import outliers
from serve_app.errors import EngineFailed
from tests.fakes.engines import FakeCluster, until
from tests.fakes.router import SOON_S, Router

SHORT = {(outliers, "FIRST_EJECTION_S"): 0.05}
NEVER = {(outliers, "FIRST_EJECTION_S"): 60.0}  # is an ejection over


class Broken:
    """The engines of these replicas fail every request, until they are mended."""

    def __init__(self, cluster: FakeCluster, *names: str) -> None:
        self.calls = 0
        self._whole = {name: cluster[name].engine.server.run for name in names}
        self._cluster = cluster
        for name in names:
            cluster[name].engine.server.run = self._run  # type: ignore[method-assign]

    async def _run(self, *_: Any, **__: Any) -> None:
        self.calls += 1
        raise EngineFailed("no luck")

    def mend(self) -> None:
        for name, run in self._whole.items():
            self._cluster[name].engine.server.run = run  # type: ignore[method-assign]


def takes(router: Router) -> dict[str, str]:
    """How many requests each replica takes: "all" that there is room for, "one" as its probe, or "none"."""
    replicas = router.model.replica_set
    words = {(True, False): "all", (True, True): "one", (False, False): "none"}
    return {name: words[replicas.takes_requests(name)] for name in replicas.running}


async def ejected(router: Router, name: str) -> None:
    """Requests that prefer this replica until it is ejected; by credit alone they may all run on another."""
    while not router.model.replica_set.ejected_count:
        await router.ask(affinity=name)


async def probe_is_due(router: Router, name: str) -> None:
    """Until the next request is this replica's probe: its ejection is over, and the router has credit there. Without
    credit the request would run where there is some."""
    accounts = router.model.queue.core.accounts
    replicas = router.model.replica_set
    await until(
        lambda: replicas.replica_to_probe() == name and accounts.credit(name)[0] > 0, SOON_S, f"{name} may be probed"
    )
