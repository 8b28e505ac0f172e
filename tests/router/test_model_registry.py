"""The models of a router follow the configuration while requests run."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.queue.admission import Arrival
from serve_app.errors import NotFound
from serve_app.ray_adapter import Handle
from serve_app.router import RequestRuns, drain_timers
from serve_app.router.model_registry import ModelRegistry
from serve_app.router.model_router import ModelRouter
from serve_app.router.queue_client import QueueClient
from serve_app.settings import Settings
from serve_app.settings.settings import ModelSettings
from serve_app.transport import Frame, Submit
from serve_app.types import Operation, RequestClass
from tests.effort import examples
from tests.fakes.asgi_client import KEY, SCRAPER_KEY, Client, ask, router_app
from tests.fakes.engines import MODEL, FakeCluster, FakeHandle, model, run, turns, until
from tests.fakes.router import LONG, SOON_S, freeze

OTHER = "other"
NEXT_KEY = "sk-next-0123456789"
SCRAPER = {"key": SCRAPER_KEY, "metrics": True}
numbers = itertools.count()


class Handles:
    """Makes a registry's handles, each on replicas of its model, and knows which were closed."""

    def __init__(self, cluster: FakeCluster, *replicas: str) -> None:
        self.made: list[tuple[str, _Handle]] = []
        self._cluster = cluster
        self._replicas = replicas

    def connect(self, settings: ModelSettings) -> Handle:
        if settings.name == MODEL:
            handle = _Handle(self._cluster)
        else:
            handle = _Handle(self._cluster.beside(settings), *(f"{settings.name}.{name}" for name in self._replicas))
        self.made.append((settings.name, handle))
        return handle

    def open(self) -> list[str]:
        """The models of the handles that are not closed, in the order in which they were made."""
        return [name for name, handle in self.made if not handle.closed]


class _Handle(FakeHandle):
    closed = 0

    def __init__(self, cluster: FakeCluster, *replicas: str) -> None:
        super().__init__(cluster)
        self._replicas = replicas

    async def watch(self, listener: Callable[[frozenset[str]], None]) -> None:
        await self._cluster.add(*self._replicas)
        await super().watch(lambda names: None if self.closed else listener(names))

    async def close(self) -> None:
        self.closed += 1


def configured(*models: ModelSettings, **more: Any) -> Settings:
    return Settings.model_validate({"models": models, "auth": {"keys": [{"key": KEY}, SCRAPER]}, **more})


def named(name: str, **changes: Any) -> ModelSettings:
    return model(**changes).model_copy(update={"name": name})


async def serve(
    line: ModelRouter, tokens: int = 5, *, started: asyncio.Event | None = None, name: str | None = None
) -> int:
    """One request to its end; the number of its frames."""
    body = {"prompt": "a prompt", "max_tokens": tokens, "stream": True}
    request = name or f"request {next(numbers)}"
    reported: list[Frame] = []

    async def relay(stream: Any, frames: list[Frame]) -> None:
        if started is not None:
            started.set()
        while frames[-1].usage is None:
            frames += await stream.next()
        reported.extend(frames)

    arrival = Arrival(request, RequestClass.NORMAL, "tenant")

    def make(number: int) -> Submit:
        return Submit(number, request, Operation.COMPLETION, body)

    await line.serve(arrival, make, relay, None, RequestRuns())
    return len(reported)


def serving(line: ModelRouter, tokens: int = 5, **more: Any) -> asyncio.Task[int]:
    return asyncio.create_task(serve(line, tokens, **more))


async def two(cluster: FakeCluster, *replicas: str) -> tuple[ModelRegistry, Handles]:
    """Two models, MODEL and OTHER, with as many replicas."""
    await cluster.add(*replicas)
    handles = Handles(cluster, *replicas)
    fleet = ModelRegistry(handles.connect, "router", await cluster.queues("router"))
    assert fleet.apply(configured(model(slots=1), named(OTHER, slots=1))) == frozenset()
    await fleet.wait_settled()
    await turns(10)
    return fleet, handles


def test_a_change_of_one_model_touches_no_other_line() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        fleet, handles = await two(cluster, "r1")
        lines = dict(fleet.models)
        changed = named(OTHER, slots=7, max_model_len=100)
        assert fleet.apply(configured(model(slots=1), changed, named("third"))) == frozenset()
        assert fleet.models[MODEL] is lines[MODEL]
        assert fleet.models[OTHER] is lines[OTHER]  # the line stays, with new settings
        assert fleet.models[OTHER].settings == changed
        assert list(fleet.models) == [MODEL, OTHER, "third"]
        assert handles.open() == [MODEL, OTHER, "third"]
        await fleet.wait_settled()
        await turns(10)
        assert [await serve(line) for line in fleet.models.values()]
        assert fleet.apply(configured(model(slots=1))) == {OTHER, "third"}
        await fleet.wait_settled()
        assert (handles.open(), list(fleet.models)) == ([MODEL], [MODEL])
        assert fleet.models[MODEL] is lines[MODEL]

    run(scenario)


def test_the_same_configuration_again_does_nothing() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        fleet, handles = await two(cluster, "r1")
        lines = dict(fleet.models)
        for _ in range(3):
            assert fleet.apply(configured(model(slots=1), named(OTHER, slots=1))) == frozenset()
        assert dict(fleet.models) == lines
        assert len(handles.made) == 2

    run(scenario)


def test_a_model_taken_out_tells_who_waits_and_finishes_what_runs() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        fleet, handles = await two(cluster, "r1")
        line = fleet.models[MODEL]
        begun = asyncio.Event()
        runs = serving(line, 60, started=begun)
        await begun.wait()
        waits = [serving(line) for _ in range(3)]
        await until(lambda: line.waiting == 3, SOON_S, "three wait")
        fleet.apply(configured(named(OTHER, slots=1)))
        assert MODEL not in fleet.models  # at once: nobody who asks from now on gets to it
        for waiter in waits:
            with pytest.raises(NotFound, match=f"'{MODEL}' was taken out of service") as reported:
                await asyncio.wait_for(waiter, SOON_S)
            assert (reported.value.param, reported.value.code) == ("model", "model_not_found")
        with pytest.raises(NotFound, match="taken out"):  # who had found the line just before
            await serve(line)
        assert handles.open() == [MODEL, OTHER]
        assert not runs.done()
        assert await runs
        await fleet.wait_settled()
        assert handles.open() == [OTHER]
        assert line.queue.waiting == 0

    run(scenario, model(slots=1))


def test_what_loses_its_replica_when_its_model_leaves_is_notified() -> None:
    """It has sent nothing yet, and would wait for another replica; there will be none."""

    async def scenario(cluster: FakeCluster) -> None:
        fleet, _ = await two(cluster, "r1")
        freeze(cluster, "r1")
        lost = serving(fleet.models[MODEL])
        await until(lambda: cluster["r1"].work > 0, SOON_S, "the engine has it")
        fleet.apply(configured(named(OTHER, slots=1)))
        cluster.kill("r1")
        with pytest.raises(NotFound, match="taken out"):
            await asyncio.wait_for(lost, SOON_S)
        await asyncio.wait_for(fleet.wait_settled(), SOON_S)

    run(scenario)


def test_a_model_taken_out_is_closed_also_if_its_engine_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process cannot be ended: the connection stays open."""
    monkeypatch.setattr(drain_timers, "OVERDUE_S", 0.1)

    async def scenario(cluster: FakeCluster) -> None:
        fleet, handles = await two(cluster, "r1")
        fleet.apply(configured(model(slots=1, drain_s=0.1), named(OTHER, slots=1)))
        begun = asyncio.Event()
        runs = serving(fleet.models[MODEL], LONG, started=begun)
        await begun.wait()
        cluster["r1"].stand_still()
        fleet.apply(configured(named(OTHER, slots=1)))
        cluster.remove("r1")
        with pytest.raises(NotFound, match="taken out"):
            await runs
        async with asyncio.timeout(SOON_S):
            await fleet.wait_settled()
        assert handles.open() == [OTHER]
        cluster["r1"].thaw()

    run(scenario)


def test_a_request_of_a_model_that_left_may_give_up_too() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        fleet, handles = await two(cluster, "r1")
        begun = asyncio.Event()
        runs = serving(fleet.models[MODEL], LONG, started=begun)
        await begun.wait()
        fleet.apply(configured(named(OTHER, slots=1)))
        await turns(5)
        assert handles.open() == [MODEL, OTHER]
        runs.cancel()
        await asyncio.wait_for(fleet.wait_settled(), SOON_S)
        assert handles.open() == [OTHER]

    run(scenario)


def test_a_model_back_at_once_does_not_meet_its_former_self() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        fleet, handles = await two(cluster, "r1")
        former = fleet.models[MODEL]
        begun = asyncio.Event()
        runs = serving(former, 100, started=begun)
        await begun.wait()
        fleet.apply(configured(named(OTHER, slots=1)))
        fleet.apply(configured(model(slots=1), named(OTHER, slots=1)))
        present = fleet.models[MODEL]
        assert present is not former
        await turns(20)
        assert await serve(present)
        assert cluster["r1"].connections == 2  # of the former one and the present one: each its own
        assert await runs
        await fleet.wait_settled()
        assert [handle.closed for _, handle in handles.made] == [1, 0, 0]
        assert await serve(present)

    run(scenario, model(slots=2))


def test_what_a_change_says_of_the_queue_holds_for_who_waits_too() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        fleet, _ = await two(cluster, "r1")
        line = fleet.models[MODEL]
        begun = asyncio.Event()
        runs = serving(line, LONG, started=begun)
        await begun.wait()
        waits = serving(line)
        await until(lambda: line.waiting == 1, SOON_S, "one waits")
        fleet.apply(configured(model(slots=1), named(OTHER), admission={"max_wait_s": 0.01}))
        with pytest.raises(Exception, match="longest wait"):
            await asyncio.wait_for(waits, SOON_S)
        runs.cancel()

    run(scenario, model(slots=1))


class QuietHandle:
    """A handle of a deployment of which Serve tells nothing until it is closed."""

    def __init__(self) -> None:
        self.closed = 0
        self._over = asyncio.Event()

    async def watch(self, listener: object) -> None:
        await self._over.wait()

    async def call_any_replica(self) -> None:
        await self._over.wait()

    async def close(self) -> None:
        self.closed += 1
        self._over.set()


@given(st.lists(st.sets(st.sampled_from("abcd"), min_size=1), min_size=1, max_size=8))
@settings(deadline=None, max_examples=examples(60))
def test_whatever_comes_and_goes_each_line_lives_exactly_as_long_as_its_model(history: list[set[str]]) -> None:
    async def scenario() -> None:
        made: list[tuple[str, QuietHandle]] = []

        def connect(settings: ModelSettings) -> Any:
            made.append((settings.name, QuietHandle()))
            return made[-1][1]

        async def away(_: Any) -> Any:
            raise TimeoutError

        client = QueueClient("router", away, away)
        fleet = ModelRegistry(connect, "router", client)
        names: set[str] = set()
        for wanted in [*history, {"last"}]:
            before = dict(fleet.models)
            assert fleet.apply(configured(*(named(name) for name in sorted(wanted)))) == names - wanted
            assert set(fleet.models) == wanted
            assert all(fleet.models[name] is before[name] for name in names & wanted)
            names = wanted
            await turns(3)
        assert [name for name, handle in made if not handle.closed] == ["last"]
        assert all(handle.closed <= 1 for _, handle in made)
        await made[-1][1].close()
        await asyncio.wait_for(fleet.wait_settled(), SOON_S)  # those who left before Serve told of them, too
        await client.stop()

    asyncio.run(scenario())


# Through the edge, as callers see it.


async def edge_of(cluster: FakeCluster, *replicas: str) -> tuple[Client, ModelRegistry, Handles]:
    fleet, handles = await two(cluster, *replicas)
    client = Client(cluster)
    reported = configured(model(slots=1), named(OTHER, slots=1))
    client.edge = router_app(reported, fleet.models, client.metrics)
    return client, fleet, handles


def test_a_scrape_survives_a_change_and_shows_nothing_of_what_left() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, fleet, handles = await edge_of(cluster, "r1")
        assert f'model="{OTHER}"' in (await client.get("/metrics")).body.decode()
        for _, handle in handles.made:
            handle.turns = lambda method: 40 if method == "load" else 2  # the change comes while engines are asked
        for wanted in ([model(slots=1), named("third")], [named("third"), named(OTHER)], [model(slots=1)]):
            scrape = asyncio.create_task(client.get("/metrics"))
            await turns(10)
            fleet.apply(configured(*wanted))
            assert (await scrape).status == 200
            shown = (await client.get("/metrics")).body.decode()
            assert {name for name in (MODEL, OTHER, "third") if f'model="{name}"' in shown} == set(fleet.models)
        await fleet.wait_settled()

    run(scenario)


def test_changed_keys_and_bounds_hold_for_the_next_request() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, fleet, _ = await edge_of(cluster, "r1")
        assert (await client.get("/health", key=NEXT_KEY)).status == 401
        keys = {"keys": [{"key": NEXT_KEY, "max_class": "low", "default_class": "low"}]}
        reported = configured(model(slots=1), auth=keys, http={"max_sequences": 1, "max_body_bytes": 1024})
        client.edge.configure(reported)
        fleet.apply(reported)
        assert (await client.get("/health")).status == 401
        assert (await client.get("/health", key=NEXT_KEY)).status == 200
        two_of_them = await client.post(ask("two of them", n=2, model=MODEL), key=NEXT_KEY)
        assert (two_of_them.status, two_of_them.error["param"]) == (400, "n")
        too_urgent = await client.post(ask("urgent", priority="high", model=MODEL), key=NEXT_KEY)
        assert too_urgent.status == 403
        too_long = await client.post(ask("x" * 2000, model=MODEL), key=NEXT_KEY)
        assert too_long.status == 413
        missing = await client.post(ask("gone", model=OTHER), key=NEXT_KEY)
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        await fleet.wait_settled()

    run(scenario)


def test_ready_is_whoever_can_serve_any_model_and_says_which_it_cannot() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        fleet, _ = await two(cluster)
        reported = configured(model())
        quiet = QuietHandle()
        queues = await cluster.queues("another")
        lines = dict(fleet.models)
        client = Client(cluster)  # a router that starts only now has never seen the broken one run
        client.edge = router_app(reported, lines, client.metrics)
        assert (await client.get("/ready")).error["code"] == "not_ready"
        await cluster.add("r1")
        await cluster.beside(named(OTHER)).add("other.r1")
        await turns(20)
        assert json.loads((await client.get("/ready")).body) == {"status": "ready", "without_replica": []}
        lines["broken"] = ModelRouter(named("broken"), quiet, reported.admission, "router", 1, queues)
        assert json.loads((await client.get("/ready")).body) == {"status": "ready", "without_replica": ["broken"]}
        cluster.kill("r1")
        cluster.beside(named(OTHER)).kill("other.r1")
        await turns(20)
        assert (await client.get("/ready")).error["code"] == "not_ready"
        lazy = ModelSettings.model_validate({"name": "lazy", "replicas": {"min_replicas": 0}})
        lines["lazy"] = ModelRouter(lazy, quiet, reported.admission, "router", 1, queues)
        assert (await client.get("/ready")).status == 200  # a request is all it takes

    run(scenario)
