"""A router replica as a plain ASGI callable on fake engine replicas, and a client that speaks ASGI to it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serve_app.batch import storage_at
from serve_app.core.receipts import Receipts
from serve_app.core.usage import UsageMeter
from serve_app.http.api.batch_lane import BatchLane
from serve_app.http.api.local_routes import LocalRoutes
from serve_app.http.api.operator_routes import ClusterCalls
from serve_app.http.api.receipt_lookup import ReceiptLookup
from serve_app.http.api.router_parts import RouterParts
from serve_app.http.app import RouterApp
from serve_app.http.console import LiveSources
from serve_app.http.keyed.runs import KeyedRuns
from serve_app.http.stored_keys import KeyFollower
from serve_app.http.tokens import JwksFollower
from serve_app.router import (
    ClusterSources,
    LimitClient,
    ModelRouter,
    ReceiptSearch,
    RequestLog,
    RouterAnswers,
    RouterMetrics,
    Scrape,
    SessionClient,
    UsageReporter,
)
from serve_app.settings import JwtSettings, KeySettings, Settings
from tests.fakes.claims import FakeClaims
from tests.fakes.cluster_calls import NoCluster
from tests.fakes.engines import MODEL, FakeCluster, turns, until
from tests.fakes.limits import FakeLimits
from tests.fakes.live_sources import silent_sources
from tests.fakes.router import LONG, SOON_S
from tests.fakes.stores import empty_follower

KEY = "sk-people-0123456789"
ADMIN_KEY = "sk-operator-0123456789"
BATCH_KEY = "sk-batch-0123456789"
SCRAPER_KEY = "sk-scraper-0123456789"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SALT_SECRET = bytes(32)


@dataclass
class Reply:
    """What the client has received so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON of the SSE events; `[DONE]` and comments left out."""
        whole = self.body.split(b"\n\n")[:-1]
        reported = [event for event in whole if event != b"data: [DONE]" and not event.startswith(b":")]
        return [json.loads(event.removeprefix(b"data: ")) for event in reported]

    @property
    def text(self) -> str:
        """The text of a completion, streamed or not, as far as it came."""
        reported = (
            self.events if self.headers["content-type"].startswith("text/event-stream") else [json.loads(self.body)]
        )
        return "".join(choice["text"] for event in reported for choice in event.get("choices", []))


def ask(prompt: str | list[str], tokens: int = 5, **more: Any) -> dict[str, Any]:
    """A completion's body; streamed unless told otherwise."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": True} | more


def router_app(
    settings: Settings,
    models: Mapping[str, ModelRouter],
    metrics: RouterMetrics,
    limits: FakeLimits | LimitClient | None = None,
    keyed_runs: KeyedRuns | None = None,
    follower: KeyFollower | None = None,
    batches: BatchLane | None = None,
    sessions: SessionClient | None = None,
    usage: UsageReporter | None = None,
    log: RequestLog | None = None,
    calls: ClusterCalls | None = None,
    live: LiveSources | None = None,
    issuer: JwksFollower | None = None,
) -> RouterApp:
    """An ASGI app that reaches no quota actor, except for claims and by `sessions`, and no other router unless
    `keyed_runs` does."""

    async def away(*_: Any) -> Any:
        raise TimeoutError

    receipts = Receipts()
    scrape = Scrape("router", metrics, models, away, ClusterSources(away, away, away, away, dict, lambda: 1))
    calls = calls or NoCluster()
    usage = usage or UsageReporter("router", away)
    limits = limits or FakeLimits()
    sessions = sessions or SessionClient(away, {})
    follower = follower or empty_follower()
    stored = follower.store.batches
    batches = batches or BatchLane(lambda: stored, lambda: storage_at(None))
    ours = limits, usage, keyed_runs or FakeClaims().join("router"), follower, batches, calls
    log = log or RequestLog()

    async def ask_routers(method: str, *arguments: Any) -> RouterAnswers:
        if method == "flush_records":
            return RouterAnswers([(log.router, await log.flush(*arguments))], [])
        asked = app.open_requests.find if method == "open_request" else app.open_requests.waiting
        return RouterAnswers([(log.router, asked(*arguments))], [])

    find_kept = ReceiptSearch(receipts, away).find_anywhere
    lookup = ReceiptLookup(find_kept, calls, ask_routers, lambda: settings.records.keep_days)
    local = LocalRoutes(models, scrape.everywhere, lookup.find, away)
    own = models, metrics, SALT_SECRET, sessions, local, receipts
    more = {"log": log, "ask_routers": ask_routers, "issuer": issuer or JwksFollower()}
    parts = RouterParts(*own, *ours, live or silent_sources(), **more)
    app = RouterApp(settings, parts)
    return app


async def exchange(
    app: RouterApp,
    method: str,
    path: str,
    messages: Iterable[dict[str, Any]],
    headers: dict[str, str] | None = None,
    *,
    key: str | None = KEY,
    query: str = "",
    rest: Callable[[], Awaitable[dict[str, Any]]] | None = None,
    reply: Reply | None = None,
    reading: Callable[[Reply], Awaitable[None]] | None = None,
) -> Reply:
    """One exchange of bare ASGI, to its end.

    Args:
        messages: of the request.
        rest: gives those that come behind them; None: the client stays until it is cancelled.
        reply: filled as the answer comes, for a caller that wants to look before the end.
        reading: awaited whenever a part of the answer has come; `send` blocks as long, as for a client that does not
            read.
    """
    got = Reply() if reply is None else reply
    sent = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    if key is not None:
        sent.append((b"authorization", f"Bearer {key}".encode()))
    asked = iter(messages)

    async def receive() -> dict[str, Any]:
        message = next(asked, None)
        if message is None and rest is not None:
            return await rest()
        if message is None:
            await asyncio.Event().wait()
        assert message is not None
        return message

    async def send(message: Any) -> None:
        assert not got.ended, "nothing may follow the end"
        if message["type"] == "http.response.start":
            assert not got.status, "one start"
            got.status = message["status"]
            got.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert got.status, "the start comes first"
            got.chunks.append(message["body"])
            got.ended = not message.get("more_body", False)
        if reading is not None:
            await reading(got)

    scope = {"type": "http", "method": method, "path": path, "headers": sent, "query_string": query.encode()}
    await app(scope, receive, send)
    assert got.ended
    return got


class Client:
    """A router replica and its callers.

    Args:
        routers: how many router replicas there are; `name` tells them apart.
        admission, http, traces: settings; limits: of the key `KEY`.
        keyed_runs: of this router, if others share its claims.
        charges: whether the quota actor charges the limits; else nothing does.
        log: of the router; calls: of its cluster.
        jwt: the settings of tokens; issuer: knows the keys that sign them.
    """

    def __init__(
        self,
        cluster: FakeCluster,
        name: str = "router",
        routers: int = 1,
        *,
        admission: dict[str, Any] | None = None,
        http: dict[str, Any] | None = None,
        traces: dict[str, Any] | None = None,
        limits: dict[str, Any] | None = None,
        keyed_runs: KeyedRuns | None = None,
        charges: bool = False,
        log: RequestLog | None = None,
        calls: ClusterCalls | None = None,
        jwt: JwtSettings | None = None,
        issuer: JwksFollower | None = None,
    ) -> None:
        keys = (
            KeySettings(key=KEY, tenant="people", max_class="high", name="desk", limits=limits),
            KeySettings(key=BATCH_KEY, tenant="batch", max_class="low", default_class="low"),
            KeySettings(key=ADMIN_KEY, tenant="people", admin=True, name="operator"),
            KeySettings(key=SCRAPER_KEY, tenant="people", metrics=True, name="scraper"),
        )
        reported = {
            "auth": {"keys": keys, "jwt": jwt},
            "admission": admission or {},
            "http": http or {},
            "traces": traces or {},
            "models": (cluster.settings,),
        }
        settings = Settings.model_validate(reported)
        self.handle = cluster.handle()
        self.cluster = cluster
        self._name = name
        self._routers = routers
        self.settings = settings
        self.metrics = RouterMetrics()
        self.limits = FakeLimits()
        self.keyed_runs = keyed_runs
        self._charges = charges
        self.log = log
        self._calls = calls
        self._issuer = issuer

    async def start(self) -> Client:
        client = await self.cluster.queues(self._name)
        admission = self.settings.admission
        self.model = ModelRouter(self.cluster.settings, self.handle, admission, self._name, self._routers, client)
        limits = LimitClient(client) if self._charges else self.limits
        kept = {"log": self.log, "calls": self._calls, "issuer": self._issuer}
        self.edge = router_app(self.settings, {MODEL: self.model}, self.metrics, limits, self.keyed_runs, **kept)
        self.cluster.closing.append(self.model.replica_set.close)
        await self.model.start()
        await turns(20)
        return self

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        key: str | None = KEY,
        query: str = "",
        reply: Reply | None = None,
        reading: Callable[[Reply], Awaitable[None]] | None = None,
    ) -> Reply:
        """One exchange, to its end.

        Args:
            reply: filled as the answer comes, for a caller that wants to look before the end.
            reading: awaited whenever a part of the answer has come; `send` blocks as long, as for a client that does
                not read.
        """
        message = {"type": "http.request", "body": body, "more_body": False}
        return await exchange(
            self.edge, method, path, [message], headers, key=key, query=query, reply=reply, reading=reading
        )

    async def post(self, body: dict[str, Any], path: str = COMPLETIONS, **more: Any) -> Reply:
        return await self.request("POST", path, json.dumps(body).encode(), **more)

    def posting(self, body: dict[str, Any], **more: Any) -> asyncio.Task[Reply]:
        return asyncio.create_task(self.post(body, **more))

    async def get(self, path: str, **more: Any) -> Reply:
        scrapes = {"key": SCRAPER_KEY} if path == "/metrics" else {}
        return await self.request("GET", path, **scrapes | more)

    def figures(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The samples of a metric of this router that are not 0, by these labels."""
        counter: Counter[tuple[str, ...]] = Counter()
        for metric in text_string_to_metric_families(self.metrics.render().decode()):
            for sample in metric.samples:
                if sample.name == name and sample.value:
                    counter[tuple(sample.labels[label] for label in labels)] += sample.value
        return dict(counter)

    @property
    def outcomes(self) -> dict[str, int]:
        """How many requests ended how."""
        return {key: int(n) for (key,), n in self.figures("serve_app_requests_total", "outcome").items()}

    @property
    def usage_meter(self) -> UsageMeter:
        """What has counted the requests for the store."""
        return self.edge.parts.usage.meter

    def engine_steps(self) -> int:
        """The steps of all engines so far."""
        return sum(one.engine.backend.load().steps for one in self.cluster.replicas.values())

    def engine_tokens(self) -> int:
        """The output tokens of all engines so far."""
        return sum(one.engine.backend.load().generated_tokens for one in self.cluster.replicas.values())

    def at_rest(self) -> bool:
        """Whether nothing waits and nothing is granted."""
        queue = self.model.queue
        return not queue.waiting and not any(queue.core.account(name)[0] for name in queue.known_engines)


async def started(cluster: FakeCluster, *replicas: str, **settings: Any) -> Client:
    await cluster.add(*replicas)
    return await Client(cluster, **settings).start()


async def running(client: Client, **body: Any) -> tuple[asyncio.Task[Reply], Reply]:
    """A long request whose first frames have come."""
    reply = Reply()
    task = client.posting(ask("long", LONG, **body), reply=reply)
    await until(lambda: bool(reply.chunks), SOON_S, "first frames")
    return task, reply


async def cancel(task: asyncio.Task[Reply]) -> None:
    """The client leaves, and its request ends by that."""
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
