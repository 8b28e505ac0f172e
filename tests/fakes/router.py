"""The router's half without HTTP, on fake engine replicas: channels and lines, and what the engines have to say."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from serve_app.core.body_bounds import body_size
from serve_app.core.queue.admission import Arrival
from serve_app.core.receipts import RequestTrace
from serve_app.core.routing import AffinityKey, TargetReason
from serve_app.engine.simulated.text import text_key, text_of
from serve_app.router import ModelRouter, RequestRuns
from serve_app.router.request_grant import RequestGrant
from serve_app.settings import AdmissionSettings
from serve_app.transport import Channel, Frame, ResponseStream, Submit
from serve_app.types import Operation, RequestClass
from tests.fakes.engines import FakeCluster, FakeHandle, turns, until

REPLICA = "r1"
SOON_S = 5.0  # for what takes milliseconds on an idle machine
LONG = 5000  # tokens: 5 s at the fake's rate, longer than any scenario lets a request live
NORMAL = RequestClass.NORMAL


class Slots:
    """The slots that a channel reports, in order."""

    def __init__(self) -> None:
        self.reported: list[int] = []
        self.drains_s: list[float | None] = []

    def __call__(self, slots: int, drain_s: float | None) -> None:
        self.reported.append(slots)
        self.drains_s.append(drain_s)


def opened(cluster: FakeCluster, router: str = "router", slots: Slots | None = None) -> tuple[Channel, FakeHandle]:
    handle = cluster.handle()
    return Channel(handle, router, REPLICA, itertools.count(1), slots or Slots()), handle  # type: ignore[arg-type]


def asked(prompt: str, tokens: int) -> Callable[[int], Submit]:
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True}
    return lambda number: Submit(number, f"id-{number}", Operation.COMPLETION, body)


def nothing() -> None:
    """No news wanted of the end."""


async def read(stream: ResponseStream) -> list[Frame]:
    frames = await stream.next()
    while frames[-1].usage is None:
        frames += await stream.next()
    return frames


async def answer(link: Channel, prompt: str, tokens: int) -> list[Frame]:
    async with link.run(asked(prompt, tokens), nothing) as stream:
        return await read(stream)


def received_text(frames: list[Frame]) -> str:
    """The text so far."""
    events = b"".join(frame.body for frame in frames).split(b"\n\n")[:-1]
    reported = [json.loads(event.removeprefix(b"data: ")) for event in events if event != b"data: [DONE]"]
    return "".join(choice["text"] for event in reported for choice in event["choices"])


def text(frames: list[Frame]) -> str:
    """The text of an answer that is whole."""
    assert frames[-1].usage is not None
    assert frames[-1].body.endswith(b"data: [DONE]\n\n")
    return received_text(frames)


def expected_text(prompt: str, tokens: int) -> str:
    """What the simulated engine has to say."""
    return text_of(text_key(0, 0, prompt), 0, tokens)


class Router:
    """A model's line in one router, and what came of the requests it was given."""

    def __init__(
        self,
        cluster: FakeCluster,
        name: str = "router",
        routers: int = 1,
        **admission: Any,
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._routers = routers
        self.handle = cluster.handle()
        self._admission = AdmissionSettings(**admission)
        self.relayed: list[str] = []
        self.places: dict[str, str] = {}
        self.why: dict[str, TargetReason] = {}
        self.traces: dict[str, RequestTrace] = {}
        self._given = 0

    async def start(self) -> Router:
        self.client = await self._cluster.queues(self._name)
        settings = self._cluster.settings
        admission = self._admission
        self.model = ModelRouter(settings, self.handle, admission, self._name, self._routers, self.client)
        self._cluster.closing.append(self.model.replica_set.close)
        await self.model.start()
        await turns(10)
        return self

    async def ask(
        self,
        tokens: int = 5,
        *,
        then: Callable[[], Awaitable[None]] | None = None,
        key: AffinityKey | None = None,
        is_row: bool = False,
        padding: str = "",
        **arrival: Any,
    ) -> list[Frame]:
        """One request to its end, with this at the end of its prompt; `then` runs once its first frames are there."""
        self._given += 1
        name = f"{self._given}"
        body: dict[str, Any] = {"prompt": f"prompt {name}{padding}", "max_tokens": tokens, "stream": True}

        async def relay(stream: ResponseStream, frames: list[Frame]) -> None:
            assert trace.replica_id is not None
            self.relayed.append(name)
            self.places[name] = trace.replica_id
            self.why[name] = trace.reason
            stream.client_has_seen = True
            reported.extend(frames)
            if then is not None:
                await then()
            while reported[-1].usage is None:
                reported.extend(await stream.next())

        reported: list[Frame] = []
        trace = self.traces[name] = RequestTrace(is_row=is_row)
        runs = RequestRuns(trace)
        asked = Arrival(name, arrival.pop("cls", NORMAL), "tenant", **arrival)
        large = body_size(Operation.COMPLETION, body).is_large()

        def make(number: int) -> Submit:
            return Submit(number, name, Operation.COMPLETION, body, is_large=large)

        await self.model.serve(asked, make, relay, key, runs)
        assert text(reported) == expected_text(body["prompt"], tokens)
        return reported

    def asking(self, tokens: int = 5, **more: Any) -> asyncio.Task[list[Frame]]:
        return asyncio.create_task(self.ask(tokens, **more))

    @property
    def used(self) -> dict[str, int]:
        """Slots of each engine that its requests hold."""
        queue = self.model.queue
        return {name: queue.core.account(name)[0] for name in sorted(queue.known_engines)}

    @property
    def waiting(self) -> int:
        return self.model.queue.waiting

    async def settled(self) -> None:
        """Nothing waits and nothing is granted."""
        await until(lambda: not self.waiting and not any(self.used.values()), SOON_S, "all given back")


class Uses:
    """What the queue was told of the use of the requests that end from now on."""

    def __init__(self, router: Router) -> None:
        self.output_tokens = 0
        self._release = router.model.queue.release
        router.model.queue.release = self._count  # type: ignore[method-assign]

    def _count(self, request_id: str, output_tokens: int | None = None, prompt_tokens: int | None = None) -> None:
        self.output_tokens += output_tokens or 0
        self._release(request_id, output_tokens, prompt_tokens)


@contextlib.asynccontextmanager
async def held(router: Router, arrival: Arrival) -> AsyncIterator[RequestGrant]:
    """A place on a replica that nothing runs on, for the block."""
    grant = await router.model.acquire(arrival, None, None, RequestRuns())
    try:
        yield grant
    finally:
        grant.release()


def freeze(cluster: FakeCluster, *names: str) -> None:
    for name in names:
        cluster[name].freeze()


def thaw(cluster: FakeCluster, *names: str) -> None:
    for name in names:
        cluster[name].thaw()
