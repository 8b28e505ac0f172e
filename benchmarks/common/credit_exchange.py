"""What requests on a router's credit cost router and quota actor: a part of `benchmarks.exchange`.

`ROUTERS` router cores and the core of the quota actor, with pickled messages between them, in virtual time. Nothing
waits, so every request begins on credit. Messages go when `serve_app.router.queue_client` sends them: after an event if
the core has one, and when reports or a heartbeat are due. CPU seconds of one core, by side.
"""

from __future__ import annotations

import heapq
import itertools
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from serve_app.core.memory import Device, EngineReport, Rank
from serve_app.core.queue import Arrival, Grant, QueuePolicy
from serve_app.core.quota import Quota
from serve_app.core.shared_queue import BATCH, ActorReply, RouterMessage, RouterQueue
from serve_app.core.times import ACTOR_TICK_S, ROUTER_HEARTBEAT_S
from serve_app.types import RequestClass

MODEL = "m"
ENGINES = 8
SLOTS = 1024
POOL_TOKENS = 10_000_000
ROUTERS = 3
RATE = 2_000.0  # requests a second, of all routers
FLIGHT_S = 0.0005  # of a message, each way
PROGRESS_S = 0.1  # between the counted tokens of a request
TOKENS = 5  # counted each time
PROMPT = 310  # tokens, as the engine counts them
BEGIN_S = 1.0  # until the routers have credit
MAX_CALLS = 4  # these three as in `serve_app.router.queue_client`
CALM_REPORT_S = 0.5
REPORT_PER_REQUEST_S = 0.0005
WARM_UP_S = 3.0


@dataclass
class CpuTimes:
    """CPU seconds by side, and what was sent."""

    router_s: float = 0.0
    actor_s: float = 0.0
    messages: int = 0
    events: int = 0
    requests: int = 0


@dataclass
class Client:
    """One router: its core, its messages in flight, when it reports next."""

    core: RouterQueue
    calls: int = 0
    sent_at: float = 0.0
    beat_at: float = 0.0
    reconciled_at: float = 0.0
    running: set[str] = field(default_factory=set)


class CreditRun:
    """Routers and actor in virtual time; each request runs for `run_s`."""

    def __init__(self, run_s: float) -> None:
        self.run_s = run_s
        self.now = 0.0
        self.times = CpuTimes()
        self.numbers = itertools.count()
        self.steps: list[tuple[float, int, Callable[[], None]]] = []
        self.quota = Quota(1, {}, 0.0)
        self.quota.on_devices([Device("n", number, 1000, 0) for number in range(ENGINES)], 0.0)
        self.reports = [self._started(f"e{number}") for number in range(ENGINES)]
        self.clients = [self._connected(f"r{number}") for number in range(ROUTERS)]
        self._at(ACTOR_TICK_S, self._tick)

    def run(self, for_s: float) -> CpuTimes:
        """Requests at `RATE` for this long, after `WARM_UP_S`; returns what they cost."""
        self._at(BEGIN_S, partial(self._arrive_next, itertools.cycle(self.clients)))
        self._until(BEGIN_S + WARM_UP_S)
        self.times = CpuTimes()
        self._until(BEGIN_S + WARM_UP_S + for_s)
        return self.times

    def _started(self, name: str) -> EngineReport:
        report = EngineReport(name, MODEL, (Rank("n"),), 1000, 1000, slots=SLOTS)
        holds = self.quota.on_engine(report, 0.0).holds
        report = replace(report, holds=holds, kv_tokens=POOL_TOKENS)
        self.quota.on_engine(report, 0.0)
        return report

    def _connected(self, name: str) -> Client:
        client = Client(RouterQueue(name))
        client.core.serve(MODEL, QueuePolicy(max_queued=1000, max_wait_s=60.0))
        for report in self.reports:
            client.core.set_reachability(MODEL, report.owner, True, 0.0)
        self._at(0.0, partial(self._send, client))
        self._at(0.0, partial(self._report, client))
        return client

    def _at(self, when: float, step: Callable[[], None]) -> None:
        heapq.heappush(self.steps, (when, next(self.numbers), step))

    def _until(self, end: float) -> None:
        while self.steps[0][0] <= end:
            self.now, _, step = heapq.heappop(self.steps)
            step()

    def _of_router(self, act: Callable[..., Any], *given: Any, **more: Any) -> Any:
        began = time.process_time()
        found = act(*given, **more)
        self.times.router_s += time.process_time() - began
        return found

    def _of_actor(self, act: Callable[..., Any], *given: Any) -> Any:
        began = time.process_time()
        found = act(*given)
        self.times.actor_s += time.process_time() - began
        return found

    def _tick(self) -> None:
        for report in self.reports:
            self.quota.on_engine(report, self.now)
        self._of_actor(self.quota.on_tick, self.now)
        self._at(self.now + ACTOR_TICK_S, self._tick)

    # Requests

    def _arrive_next(self, clients: itertools.cycle[Client]) -> None:
        self._arrive(next(clients))
        self._at(self.now + 1.0 / RATE, partial(self._arrive_next, clients))

    def _arrive(self, client: Client) -> None:
        number = next(self.numbers)
        request_id = f"q{number}"
        level = RequestClass(1 + number % 3)
        cost = 500 + number % 700
        arrival = Arrival(request_id, level, f"tenant-{number % 8}", 1, cost, prompt_tokens=300, preemptible=True)
        actions = self._of_router(client.core.on_arrive, MODEL, arrival, self.now)
        if not any(isinstance(action, Grant) for action in actions):
            raise RuntimeError(f"{request_id} was not granted on credit at {self.now:.3f} s")
        self.times.requests += 1
        client.running.add(request_id)
        self._send(client)
        self._at(self.now + PROGRESS_S / 2, partial(self._progress, client, request_id, self.now + self.run_s, PROMPT))
        self._at(self.now + self.run_s, partial(self._end, client, request_id))

    def _progress(self, client: Client, request_id: str, ends_at: float, counted: int) -> None:
        self._of_router(client.core.in_flight.progress, request_id, TOKENS, counted)
        if self.now + PROGRESS_S < ends_at:
            self._at(self.now + PROGRESS_S, partial(self._progress, client, request_id, ends_at, 0))

    def _end(self, client: Client, request_id: str) -> None:
        client.running.discard(request_id)
        self._of_router(client.core.on_done, request_id, self.now, PROMPT, TOKENS)
        self._send(client)

    # Messages

    def _send(self, client: Client, *, beat: bool = False) -> None:
        while client.calls < MAX_CALLS:
            message = self._of_router(client.core.next_message, self.now, beat=beat)
            if message is None:
                return
            beat = False
            client.sent_at = self.now
            client.calls += 1
            self.times.messages += 1
            self.times.events += len(message.events)
            written = self._of_router(pickle.dumps, message)
            self._at(self.now + FLIGHT_S, partial(self._take, client, written, self.now))

    def _take(self, client: Client, written: bytes, sent_at: float) -> None:
        reply = self._of_actor(self._exchange, written)
        self.quota.changes()
        self._at(self.now + FLIGHT_S, partial(self._answered, client, reply, sent_at))

    def _exchange(self, written: bytes) -> bytes:
        message: RouterMessage = pickle.loads(written)
        return pickle.dumps(self.quota.on_exchange(message, self.now))

    def _answered(self, client: Client, written: bytes, sent_at: float) -> None:
        client.calls -= 1
        self._of_router(self._hear, client, written, sent_at)
        self._send(client)

    def _hear(self, client: Client, written: bytes, sent_at: float) -> None:
        reply: ActorReply = pickle.loads(written)
        client.core.on_reply(reply, sent_at, self.now)

    def _report(self, client: Client) -> None:
        """As `QueueClient._report`."""
        report_s = max(CALM_REPORT_S, REPORT_PER_REQUEST_S * min(BATCH, len(client.running)))
        if self.now >= client.reconciled_at + ROUTER_HEARTBEAT_S:
            client.reconciled_at = self.now
            self._of_router(client.core.reconcile, dict.fromkeys(client.running, True), self.now)
            self._send(client)
        is_due = client.core.has_reports and self.now >= client.sent_at + report_s
        if is_due or self.now >= client.beat_at + ROUTER_HEARTBEAT_S:
            client.beat_at = self.now
            self._send(client, beat=True)
        wait_s = client.sent_at + report_s - self.now
        self._at(self.now + (wait_s if wait_s > 1e-9 else report_s), partial(self._report, client))


def measure(run_s: float, for_s: float) -> dict[str, float]:
    """CPU microseconds a request, by side, of requests that run so long."""
    times = CreditRun(run_s).run(for_s)
    return {
        "router_us": round(times.router_s / times.requests * 1e6, 1),
        "actor_us": round(times.actor_s / times.requests * 1e6, 1),
        "actor_cores": round(times.actor_s / for_s, 3),
        "messages_per_s": round(times.messages / for_s, 1),
        "events_per_request": round(times.events / times.requests, 2),
    }
