"""The live state over ASGI: one maker for all consoles, no source holds it up, and a stream ends when it has to."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from serve_app.core.batches import BatchRecord
from serve_app.core.live import LiveModel, QuotaPart, RouterPart, Wait, waiting_rows
from serve_app.errors import StoreAway
from serve_app.http.app import RouterApp
from serve_app.http.console import live_stream, live_watch
from serve_app.router import RouterMetrics
from serve_app.settings import Settings
from tests.core.live.worlds import batch, figures, session, state
from tests.fakes.asgi_client import Reply, exchange, router_app
from tests.fakes.live_sources import silent_sources
from tests.fakes.virtual_time import now, run_in_virtual_time, time_passes

OPERATOR = "sk-operator-0123456789"
ACME = "sk-acme-0123456789"
RIVAL = "sk-rival-0123456789"
KEYS = (
    {"key": OPERATOR, "name": "night shift", "tenant": "ops", "admin": True},
    {"key": ACME, "name": "acme's", "tenant": "acme"},
    {"key": RIVAL, "name": "rival's", "tenant": "rival"},
)
LIVE = "/console/live"
NEVER_S = 1e6  # longer than any test looks
BOUND_S = 1e4
TURNS = 4  # of the watch


@dataclass
class Cluster:
    """Who is asked, and how often they were. `delays`: seconds for an answer, by source. `fails`: those that raise."""

    asked: Counter[str] = field(default_factory=Counter)
    delays: dict[str, float] = field(default_factory=dict)
    fails: dict[str, BaseException] = field(default_factory=dict)
    tenants: set[str] = field(default_factory=set)
    running: int = 0
    names: frozenset[str] = frozenset({"router", "r2"})
    waits: list[Wait] = field(
        default_factory=lambda: [Wait("high", "acme", 3.0, "slots"), Wait("low", "rival", 1.0, "turn")]
    )

    async def _answer(self, source: str, answer: Any) -> Any:
        self.asked[source] += 1
        self.running += 1
        try:
            await time_passes(self.delays.get(source, 0.001))
            if source in self.fails:
                raise self.fails[source]
            return answer() if callable(answer) else answer
        finally:
            self.running -= 1

    async def quota(self, tenants: tuple[str, ...]) -> QuotaPart:
        self.tenants.update(tenants)
        rows = waiting_rows("chat", self.waits, tenants)
        sessions = (session("acme", 0), session("rival", 0))
        found: QuotaPart = await self._answer("quota", QuotaPart(figures(), rows, {"chat": len(self.waits)}, sessions))
        return found

    async def routers(self, tenants: tuple[str, ...]) -> dict[str, RouterPart]:
        def parts() -> dict[str, RouterPart]:
            at = now()
            counts = {("chat", tenant): (int(10 * at), int(500 * at)) for tenant in (None, *tenants)}
            return {name: RouterPart(name, at, {"chat": 1}, counts=counts) for name in self.names}

        found: dict[str, RouterPart] = await self._answer("routers", parts)
        return found

    async def state(self) -> dict[str, Any]:
        found: dict[str, Any] = await self._answer("state", state())
        return found

    async def addresses(self) -> dict[str, str]:
        found: dict[str, str] = await self._answer("addresses", {"n1": "10.0.0.1"})
        return found

    async def batches(self, tenants: tuple[str, ...]) -> list[BatchRecord]:
        found: list[BatchRecord] = await self._answer("store", [batch("acme", 1), batch("rival", 1)])
        return found

    def app(self) -> RouterApp:
        sources = silent_sources(
            router_names=lambda: self.names,
            models=lambda: {"chat": LiveModel(100)},
            quota=self.quota,
            routers=self.routers,
            state=self.state,
            addresses=self.addresses,
            batches=self.batches,
        )
        return router_app(Settings.model_validate({"auth": {"keys": KEYS}}), {}, RouterMetrics(), live=sources)


class Browser:
    """One console, from its first event to its end."""

    def __init__(self, app: RouterApp, key: str = OPERATOR, **more: Any) -> None:
        self.reply = Reply()
        message = {"type": "http.request", "body": b"", "more_body": False}
        self.task = asyncio.create_task(exchange(app, "GET", LIVE, [message], key=key, reply=self.reply, **more))

    @property
    def events(self) -> list[tuple[str, Any]]:
        """Names and values."""
        whole = [event for event in self.reply.body.split(b"\n\n")[:-1] if not event.startswith(b":")]
        pairs = [event.decode().split("\n") for event in whole]
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]

    @property
    def states(self) -> list[Any]:
        return [value for name, value in self.events if name == "live"]

    async def state(self, number: int = 1) -> Any:
        """The state of this number."""
        while len(self.states) < number:
            assert not self.task.done(), self.reply.body
            await asyncio.sleep(0.01)  # bound: the scenario's
        return self.states[number - 1]

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


def check(scenario: Callable[[Cluster, RouterApp], Awaitable[None]]) -> None:
    async def begun() -> None:
        here = Cluster()
        await scenario(here, here.app())
        await asyncio.sleep(0.01)  # bound: virtual
        assert not here.running, "nothing is asked without a console"

    run_in_virtual_time(begun(), BOUND_S)  # which sees the tasks that are left


def test_an_operator_sees_all_and_a_tenant_its_own_at_once_and_every_two_seconds() -> None:
    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        operator = Browser(app)
        acme = Browser(app, ACME)
        everything = await operator.state()
        assert now() < live_watch.WAIT_S
        assert operator.reply.headers["content-type"].startswith("text/event-stream")
        assert {"name": "night shift", "admin": True, "scope": "all", "tenant": None}.items() <= everything.items()
        assert [queue["tenant"] for queue in everything["models"][0]["queues"]] == ["acme", "rival"]
        assert everything["missing"] == []
        assert [one["name"] for one in everything["routers"]] == ["r1", "r2", "router"]
        own = await acme.state()
        assert {"name": "acme's", "admin": False, "scope": "tenant", "tenant": "acme"}.items() <= own.items()
        assert "rival" not in json.dumps(own)
        assert [one["tenant"] for one in own["batches"]] == ["acme"]
        await operator.state(3)
        rates = operator.states[2]["models"][0]
        assert rates["requests_per_s"] == pytest.approx(20, rel=0.05), "10 at each of two routers"
        assert 2 * live_watch.PERIOD_S <= now() < 3 * live_watch.PERIOD_S
        await operator.leave()
        await acme.leave()

    check(scenario)


def test_ten_consoles_ask_no_more_than_one() -> None:
    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        browsers = [Browser(app) for _ in range(10)]
        for browser in browsers:
            await browser.state(TURNS)
        assert cluster.asked["quota"] <= TURNS + 1
        assert cluster.asked["routers"] <= TURNS + 1
        assert cluster.asked["state"] <= 3, "every five seconds"
        assert len({json.dumps(browser.states[-1]) for browser in browsers}) == 1
        for browser in browsers:
            await browser.leave()

    check(scenario)


def test_a_tenant_that_comes_later_finds_its_rows_at_once() -> None:
    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        cluster.waits = [Wait("high", f"t{n}", 1.0, "slots") for n in range(100) for _ in range(3)]
        cluster.waits.append(Wait("low", "rival", 1.0, "turn"))
        operator = Browser(app)
        first = await operator.state()
        assert "rival" not in [queue["tenant"] for queue in first["models"][0]["queues"]], "it is among the others"
        began = now()
        rival = Browser(app, RIVAL)
        own = await rival.state()
        assert now() - began < live_watch.PERIOD_S
        assert [queue["waiting"] for queue in own["models"][0]["queues"]] == [1]
        assert cluster.tenants == {"rival"}
        await operator.leave()
        await rival.leave()

    check(scenario)


@pytest.mark.parametrize(
    ("source", "missing", "limit_s"),
    [
        ("quota", ["quota_actor"], live_watch.QUOTA_LIMIT_S),
        ("state", ["controller"], live_watch.STATE_LIMIT_S),
        ("store", ["store"], live_watch.STORE_LIMIT_S),
        ("routers", ["router r2", "router router"], live_watch.ROUTERS_LIMIT_S),
    ],
)
def test_a_source_that_hangs_is_missing_and_holds_up_no_state(source: str, missing: list[str], limit_s: float) -> None:
    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        operator = Browser(app)
        assert (await operator.state())["missing"] == []
        cluster.delays[source] = NEVER_S
        began = now()
        while operator.states[-1]["missing"] != missing:
            await asyncio.sleep(0.1)  # bound: the next assertion
            assert now() - began < live_watch.BATCHES_EVERY_S + limit_s + 2 * live_watch.PERIOD_S
        before = len(operator.states)
        began = now()
        await operator.state(before + 3)
        assert now() - began <= 3 * (live_watch.PERIOD_S + live_watch.WAIT_S)
        del cluster.delays[source]
        await operator.state(len(operator.states) + 10)
        assert operator.states[-1]["missing"] == []
        await operator.leave()

    check(scenario)


@pytest.mark.parametrize(
    "error", [StoreAway("away"), TimeoutError(), ConnectionError("gone"), ValueError("a bug of ours")]
)
def test_a_source_that_fails_is_missing_and_the_others_are_shown(error: BaseException) -> None:
    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        cluster.fails["quota"] = error
        operator = Browser(app)
        found = await operator.state()
        assert found["missing"] == ["quota_actor"]
        assert found["models"][0]["wanted"] == 2
        assert [one["id"] for one in found["batches"]] == ["batch_acme_1", "batch_rival_1"]
        await operator.leave()

    check(scenario)


def without(app: RouterApp, name: str) -> None:
    """Take a key out of the configuration."""
    kept = tuple(key for key in app.settings.auth.keys if key.name != name)
    auth = app.settings.auth.model_copy(update={"keys": kept})
    app.configure(app.settings.model_copy(update={"auth": auth}))


def test_a_stream_ends_when_its_key_goes_and_the_others_go_on() -> None:
    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        operator = Browser(app)
        acme = Browser(app, ACME)
        await acme.state()
        without(app, "acme's")
        began = now()
        await acme.task
        assert now() - began <= live_stream.CHECK_S + 0.1
        assert acme.events[-1][0] == "end"
        assert acme.events[-1][1]["error"]["code"] == "invalid_api_key"
        assert acme.reply.ended
        await operator.state(3)
        await operator.leave()

    check(scenario)


def test_a_stream_ends_when_the_rights_of_its_key_change() -> None:
    """A new connection gets what the key may see now."""

    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        operator = Browser(app)
        await operator.state()
        keys = tuple(key.model_copy(update={"admin": False}) for key in app.settings.auth.keys)
        app.configure(app.settings.model_copy(update={"auth": app.settings.auth.model_copy(update={"keys": keys})}))
        await operator.task
        again = Browser(app)
        assert (await again.state())["scope"] == "tenant"
        await again.leave()

    check(scenario)


def test_a_router_that_is_taken_out_of_service_ends_its_streams() -> None:
    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        operator = Browser(app)
        await operator.state()
        cluster.names = frozenset({"r2"})
        began = now()
        await operator.task
        assert now() - began <= live_stream.CHECK_S + 0.1
        assert operator.reply.ended

    check(scenario)


def test_a_router_that_serve_has_not_listed_yet_is_not_leaving() -> None:
    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        cluster.names = frozenset({"r2"})
        operator = Browser(app)
        await operator.state(2)
        await operator.leave()

    check(scenario)


def test_the_keys_of_a_tenant_cannot_take_the_consoles_of_the_others() -> None:
    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        browsers = [Browser(app, ACME) for _ in range(live_watch.MAX_OF_TENANT)]
        await browsers[-1].state()
        refused = Browser(app, ACME)
        await refused.task
        assert (refused.reply.status, refused.reply.error["code"]) == (503, "too_many_consoles")
        assert refused.reply.headers["retry-after"] == "5"
        for key in (RIVAL, OPERATOR):
            other = Browser(app, key)
            await other.state()
            await other.leave()
        await browsers.pop().leave()
        late = Browser(app, ACME)
        await late.state()
        for browser in (*browsers, late):
            await browser.leave()

    check(scenario)


def test_a_router_has_a_bounded_number_of_consoles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_watch, "MAX_CONSOLES", 3)
    monkeypatch.setattr(live_watch, "MAX_OF_TENANTS", 1)

    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        acme = Browser(app, ACME)
        await acme.state()
        rival = Browser(app, RIVAL)
        await rival.task
        assert rival.reply.status == 503, "two are kept for operators"
        operators = [Browser(app), Browser(app)]
        await operators[1].state()
        late = Browser(app)
        await late.task
        assert late.reply.status == 503
        for browser in (acme, *operators):
            await browser.leave()

    check(scenario)


def test_a_large_state_is_sent_less_often_and_never_faster_than_a_mobile_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_stream, "BYTES_PER_S", 200)

    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        operator = Browser(app)
        await operator.state(3)
        sent = sum(map(len, operator.reply.chunks[:-1]))
        assert sent / now() <= 200 * 1.1
        await operator.leave()

    check(scenario)


def test_a_reader_that_does_not_read_is_left_and_holds_up_nobody() -> None:
    async def stuck(_: Reply) -> None:
        await time_passes(NEVER_S)

    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        slow = Browser(app, reading=stuck)
        operator = Browser(app)
        await operator.state(3)
        with pytest.raises(AssertionError):  # of the fake: the answer has no end
            await slow.task
        assert now() <= live_stream.SEND_S + live_watch.PERIOD_S
        assert not slow.reply.ended
        await operator.leave()

    check(scenario)


def test_a_head_request_gets_no_stream() -> None:
    async def scenario(cluster: Cluster, app: RouterApp) -> None:
        message = {"type": "http.request", "body": b"", "more_body": False}
        reply = await exchange(app, "HEAD", LIVE, [message], key=OPERATOR)
        assert (reply.status, reply.body) == (200, b"")
        assert not cluster.asked

    check(scenario)
