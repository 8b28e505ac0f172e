"""What a million requests leave behind in a router: `python -m benchmarks.residue [--requests 1000000]`.

The whole router but its sockets: the ASGI edge with keys, metrics, receipts and estimates, routing, health and
channels, in front of engine replicas on the simulated engine (`benchmarks.residue.near_engines`), and the quota actor
with the line that all routers share (`benchmarks.residue.near_quota`). All of it is in one process: what is measured is
what all keep. Callers ask without a pause, each request with an id, a prompt and a client's name of its own, many with
a session's: they are answered, leave while they wait or while it runs, are refused in a full line, and miss their
deadline; a replica is lost after every `REPLICA_LIVES` requests and another comes, under a new name. The metrics are
scraped.

The resident set, after a garbage collection, is regressed on the requests made, without the first third: rings, label
sets and estimates fill up in it. It is bounded by time; who cuts it off says how many requests were made.

Prints one JSON object last.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import logging
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.output import write_json
from benchmarks.residue.near_engines import NearEngines
from benchmarks.residue.near_quota import NearQuota, near_quota
from serve_app.core.receipts import Receipts
from serve_app.router import LimitClient, ModelRouter, QueueClient, RouterMetrics, UsageReporter
from serve_app.settings import KeySettings, ModelSettings, Settings, SimulatedSettings
from tests.fakes.asgi_client import router_app

MODEL = "simulated"
REQUESTS = 1_000_000
SCRAPER = "sk-scraper-0123456789"
TENANTS = 40  # labels of the metrics: bounded by the keys
REPLICAS = 3
SLOTS = 8
MAX_QUEUED = 24
CALLERS = 52  # a few more than have room
KV_TOKENS = 50_000  # of each replica
REPLICA_LIVES = 2_000  # requests between two losses of a replica
SAMPLES = 120
LIMIT_S = 1_500.0  # what is slower than twice a quiet machine's rate is cut off
KINDS = {"answer": 70, "leave early": 10, "leave running": 10, "deadline": 10}
# until all tasks of requests have ended
REST_S = 10.0
REST_LOOKS = 100
EARLY_S = 0.002  # after which those leave who do not wait for their turn; about half the wait
ENDS = ("ok", "refused", "cancelled_queued", "cancelled_running")  # outcomes without which a run proves nothing


@dataclass(frozen=True)
class Slope:
    """A regression line's slope, and the half-width of its 95% interval."""

    slope: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        return self.slope - self.error, self.slope + self.error


def regress(points: list[tuple[int, int]]) -> Slope:
    """Least squares. Neighbouring residuals resemble each other, and count as so much fewer: n (1 - r) / (1 + r) of n,
    with r their correlation.

    Raises:
        ValueError: fewer than ten points.
    """
    if len(points) < 10:
        raise ValueError(f"{len(points)} points are too few for a slope")
    x, y = np.asarray(points, dtype=np.float64).T
    slope, intercept = np.polyfit(x, y, 1)
    rest = y - slope * x - intercept
    total = float(rest @ rest)
    square = float(np.sum((x - x.mean()) ** 2))
    count = len(points)
    alike = max(0.0, float(rest[:-1] @ rest[1:]) / total) if total else 0.0
    effective = max(3.0, count * (1.0 - alike) / (1.0 + alike))
    error = math.sqrt(total / (effective - 2.0) / square * count / effective) if total else 0.0
    return Slope(float(slope), 1.96 * error)


def resident_bytes() -> int:
    """Of this process, now."""
    return int(psutil.Process().memory_info().rss)


@dataclass
class Router:
    """One router replica without its sockets, and its callers."""

    requests: int
    seed: int = 1
    points: list[tuple[int, int]] = field(default_factory=list)  # requests made, and bytes resident
    deadlines_missed: int = 0
    tasks_left: int = 0  # more than before the first request, once all have ended
    lost: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        simulated = SimulatedSettings(decode_step_s=0.0, prefill_tokens_per_s=1e9)
        model = ModelSettings(name=MODEL, engine="simulated", max_num_seqs=SLOTS, simulated=simulated)
        self._keys = [f"sk-residue-{number:06d}" for number in range(TENANTS)]
        keys = [KeySettings(key=key, tenant=f"tenant-{at}") for at, key in enumerate(self._keys)]
        keys.append(KeySettings(key=SCRAPER, tenant="tenant-0", metrics=True))
        settings = {"auth": {"keys": keys}, "admission": {"max_queued": MAX_QUEUED}, "models": (model,)}
        self._settings = Settings.model_validate(settings)
        self._model = model
        self.engines = NearEngines(model)
        self.left: dict[str, Any] = {}  # what the actor still had of requests at the end
        self.metrics = RouterMetrics()
        self.receipts = Receipts()
        self._models: dict[str, ModelRouter] = {}
        self.usage = UsageReporter("router", _away)
        self._made = itertools.count()
        self.ended = 0

    async def run(self, limit_s: float = LIMIT_S) -> None:
        """All requests to their ends, or as many as come to it in time."""
        async with near_quota() as quota:
            shared = QueueClient("router", quota.exchange, quota.watch)
            router = self._models[MODEL] = ModelRouter(
                self._model, self.engines, self._settings.admission, "router", 1, shared
            )
            await shared.start()
            self._edge = router_app(self._settings, self._models, self.metrics, LimitClient(shared), usage=self.usage)
            self.receipts = self._edge.parts.receipts
            names = [await self._engine(quota) for _ in range(REPLICAS)]
            await router.start()
            before = asyncio.all_tasks()
            try:
                await self._ask_all(quota, names, time.monotonic() + limit_s)
                self.left = await quota.left()
                self.tasks_left = await _tasks_left(len(before))
            finally:
                await router.close()
                await shared.stop()
                await self.engines.end()

    async def _ask_all(self, quota: NearQuota, names: list[str], until: float) -> None:
        callers = [asyncio.create_task(self._caller(until)) for _ in range(CALLERS)]
        every = max(1, self.requests // SAMPLES)
        sampled = lost = 0
        while not all(caller.done() for caller in callers):
            await asyncio.wait(callers, timeout=0.02, return_when=asyncio.FIRST_EXCEPTION)
            if self.ended >= lost + REPLICA_LIVES:
                lost = self.ended
                names.append(await self._engine(quota))
                await self.engines.lose(names[0])
                await quota.engine_ends(names.pop(0))
                self.lost += 1
            if self.ended >= sampled + every:
                sampled = self.ended
                await self._sample()
        await asyncio.gather(*callers)

    async def _engine(self, quota: NearQuota) -> str:
        name = await self.engines.add()
        await quota.engine_runs(name, MODEL, SLOTS, KV_TOKENS)
        return name

    async def _sample(self) -> None:
        """What is resident when nothing that could be collected is left."""
        await self._ask("GET", "/metrics", b"", [_key(SCRAPER)])
        gc.collect()
        self.points.append((self.ended, resident_bytes()))
        if len(self.points) % 10 == 0:
            made, now = self.points[-1]
            print(f"{made} of {self.requests} requests, {now / 2**20:.1f} MiB", file=sys.stderr, flush=True)

    async def _caller(self, until: float) -> None:
        while (number := next(self._made)) < self.requests and time.monotonic() < until:
            await self._request(number)
            self.ended += 1

    async def _request(self, number: int) -> None:
        draw = self._draw
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        tokens = 400 if kind == "leave running" else draw.randrange(1, 6)
        body = {
            "model": MODEL,
            "prompt": f"{draw.random()} is what {number} has to say " * draw.randrange(1, 4),
            "max_tokens": tokens,
            "stream": kind == "leave running" or draw.random() < 0.5,
            "priority": draw.choice(("low", "normal", "high")),
        }
        headers = [
            _key(draw.choice(self._keys)),
            (b"content-type", b"application/json"),
            (b"x-request-id", f"client-{number}".encode()),
        ]
        if draw.random() < 0.3:
            headers.append((b"x-session-id", f"session-{number // 3}".encode()))
        if kind == "deadline":
            headers.append((b"x-deadline-ms", b"%d" % draw.randrange(1, 4)))
        status = await self._ask("POST", "/v1/completions", json.dumps(body).encode(), headers, kind)
        self.deadlines_missed += status == 429 and kind == "deadline"

    async def _ask(
        self, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]], kind: str = "answer"
    ) -> int:
        """One exchange in a task of its own, as Serve does it; a caller who leaves cancels it. Returns the status."""
        asked = iter([{"type": "http.request", "body": body, "more_body": False}])
        status = 0
        leaves: asyncio.TimerHandle | None = None

        async def receive() -> dict[str, Any]:
            nonlocal leaves
            if kind == "leave early" and leaves is None:  # not before: a task that has not begun never was a request
                leaves = asyncio.get_running_loop().call_later(EARLY_S, task.cancel)
            message = next(asked, None)
            if message is None:
                await asyncio.Event().wait()  # the caller stays until it is cancelled
            assert message is not None
            return message

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            if kind == "leave running" and message["type"] == "http.response.body":
                task.cancel()

        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        task = asyncio.create_task(self._edge(scope, receive, send))
        try:
            await asyncio.wait({task})
        finally:
            if leaves is not None:
                leaves.cancel()
        if not task.cancelled():
            task.result()
        return status

    def outcomes(self) -> dict[str, int]:
        """How many requests ended how."""
        found: Counter[str] = Counter()
        for metric in text_string_to_metric_families(self.metrics.render().decode()):
            for sample in metric.samples:
                if sample.name == "serve_app_requests_total":
                    found[sample.labels["outcome"]] += int(sample.value)
        return dict(found)


async def _away(*_: Any) -> Any:
    """No quota actor and no other router: the benchmark asks for no session and no receipt."""
    raise TimeoutError


async def _tasks_left(before: int) -> int:
    """Tasks there are more of than before, once the last ones had time to end: a message that is on its way, an answer
    that was just read."""
    for _ in range(REST_LOOKS):
        if len(asyncio.all_tasks()) <= before:
            break
        await asyncio.sleep(REST_S / REST_LOOKS)
    return max(0, len(asyncio.all_tasks()) - before)


def _key(key: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {key}".encode()


def measure(requests: int, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run, and fit.

    Raises:
        RuntimeError: something kept its place after its end, or a way to end was not taken.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # every loss of a replica is a warning there
    router = Router(requests)
    gc.freeze()  # so that the collections before each look cost what the requests have made, and not all of Ray
    began = time.monotonic()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(router.run(limit_s))
    outcomes = router.outcomes()
    if router.left:
        raise RuntimeError(f"somebody is left in the line: {router.left}")
    if missing := [name for name in ENDS if not outcomes.get(name)]:
        raise RuntimeError(f"no request ended as {', '.join(missing)}: {outcomes}")
    kept = [(made, now) for made, now in router.points if made >= router.ended / 3]
    found = regress(kept)
    return {
        "rss_slope_bytes_per_request": round(found.slope, 3),
        "rss_slope_interval": [round(bound, 3) for bound in found.interval],
        "requests": router.ended,
        "outcomes": outcomes,
        "deadlines_missed": router.deadlines_missed,
        "tasks_left": router.tasks_left,
        "replicas_lost": router.lost,
        "rss_mib": [round(now / 2**20, 1) for _, now in (kept[0], kept[-1])],
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="ends the run, complete or not")
    options = parser.parse_args()
    write_json(measure(options.requests, options.limit_s))
