"""Three routers on one engine replica, which share their claims, and keyed requests to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.http.keyed import claim_client, runs
from tests.fakes.asgi_client import Client, Reply, ask
from tests.fakes.claims import FakeClaims
from tests.fakes.engines import FakeCluster, run
from tests.fakes.router import LONG, SOON_S
from tests.fakes.until import until

KEYED = {"Idempotency-Key": "one"}
TOKENS = 8
ANY = 500  # tokens of a run that outlives its router: half a second
LATER_S = 0.3  # well above the grace of these tests, 0.1 s
REPLAY = "x-idempotent-replay"


class Three:
    """Three routers on one engine replica, by their ids."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.claims = FakeClaims()
        self.routers: dict[str, Client] = {}

    async def start(self) -> Three:
        await self.cluster.add("r1")
        for name in "abc":
            client = Client(self.cluster, name, 3, keyed_runs=self.claims.join(name))
            self.routers[name] = await client.start()
        return self

    def __getitem__(self, router: str) -> Client:
        return self.routers[router]

    def posting(self, router: str, reply: Reply | None = None, **more: Any) -> asyncio.Task[Reply]:
        """A keyed request."""
        asked = {"tokens": TOKENS, "headers": KEYED, "stream": True} | more
        headers = asked.pop("headers")
        tokens = asked.pop("tokens")
        stream = asked.pop("stream")
        return self[router].posting(ask("p", tokens, stream=stream), headers=headers, reply=reply, **asked)

    async def post(self, router: str, **more: Any) -> Reply:
        return await asyncio.wait_for(self.posting(router, **more), SOON_S)

    async def begun(self, router: str, **more: Any) -> tuple[asyncio.Task[Reply], Reply]:
        """A long keyed request whose client has got something."""
        reply = Reply()
        task = self.posting(router, reply, tokens=LONG, **more)
        await until(lambda: bool(reply.chunks), SOON_S, "first frames")
        return task, reply

    async def beat(self, *names: str) -> None:
        """These routers report."""
        for name in names or tuple("abc"):
            while not await self.claims.routers[name].claims.report(is_beat=True):
                pass

    def results(self) -> dict[str, float]:
        """What became of keyed requests, over all routers."""
        reported: dict[str, float] = {}
        for client in self.routers.values():
            for (result,), count in client.figures("serve_app_idempotent_requests_total", "result").items():
                reported[result] = reported.get(result, 0.0) + count
        return reported

    @property
    def runs(self) -> int:
        """How often an engine was asked."""
        return len(self.cluster.submits)


def check(scenario: Callable[[Three], Awaitable[None]], **waits: float) -> None:
    async def whole(cluster: FakeCluster) -> None:
        await scenario(await Three(cluster).start())

    places = {"RUN_GRACE_S": runs, "COPY_S": runs, "JOIN_S": runs, "CLAIM_WAIT_S": claim_client}
    run(whole, waits={(places[name], name): seconds for name, seconds in waits.items()})
