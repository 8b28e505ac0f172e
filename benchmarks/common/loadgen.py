"""A closed-loop HTTP load generator in a process of its own, light because it shares the cores with the server.

`python -m benchmarks.common.loadgen` reads one JSON `Spec` from standard input, writes `begin` and `end` to standard
output at the edges of its measuring window (whoever counts CPU time reads it there) and the result as one JSON line
last.

Each client holds one connection and has exactly one request in flight. Clients warm up, the window opens, closes by
time or by count, and requests then in flight are read to their end, so that the server's token count of each is known.
Invariant: a token counts in the window in which its event arrived; any answer that is not whole fails the run.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.common.output import write_json, write_line
from benchmarks.common.sse import AnswerReader, Usage
from benchmarks.common.workload import Spec, prompts, request_bytes

SLICE_S = 1.0  # longer than one wave of 64 answers' prefills, short enough for several slices in a window
STALL_S = 120.0  # beyond the window: a warm-up or a drain that takes longer means that the server hangs
MAX_ERROR_SAMPLES = 5  # enough to see what went wrong without burying the report


@dataclass(slots=True)
class Request:
    """One request: time stamps in seconds of one monotonic clock, a stamp for each event that carried tokens."""

    started: float
    stamps: list[float] = field(default_factory=list)
    ended: float = 0.0
    usage: Usage | None = None
    done: bool = False


class Run:
    """The state that all clients share: the window, the finished requests, the errors."""

    def __init__(self, spec: Spec, loop: asyncio.AbstractEventLoop) -> None:
        self.spec = spec
        self.loop = loop
        self.prompts = prompts(spec.seed)
        self.requests: list[Request] = []
        self.errors: list[str] = []
        self.reconnects = 0
        self.warm: set[int] = set()
        self.warmup_over = self.stopping = False
        self.began = self.ended = 0.0
        self.cpu_at_begin = self.cpu_s = 0.0
        self.in_window = 0
        self.open_clients = spec.clients
        self.finished: asyncio.Future[None] = loop.create_future()
        self.connecting: set[asyncio.Task[Any]] = set()  # the loop itself keeps no reference to its tasks

    def start(self) -> None:
        """Open the connections, spread over the warm-up, and set the clocks that bound the run.

        Clients that start together stay together: their answers, all of one length, would end and begin in waves.
        """
        self.loop.call_later(self.spec.warmup_s, self._end_warmup)
        self.loop.call_later(self.spec.warmup_s + self.spec.window_s + STALL_S, self._stall)
        for number in range(self.spec.clients):
            self.loop.call_later(self.spec.warmup_s * number / self.spec.clients, self.connect, number)

    def connect(self, number: int) -> None:
        if self.stopping:
            self.close_one()
            return
        task = self.loop.create_task(
            self.loop.create_connection(lambda: Client(self, number), self.spec.host, self.spec.port)
        )
        self.connecting.add(task)
        task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[Any]) -> None:
        self.connecting.discard(task)
        if error := task.exception():
            self.fail(f"no connection: {error}")
            self.close_one()

    def fail(self, message: str) -> None:
        """Count an error and end the run: figures beside errors would compare unequal work."""
        self.errors.append(message)
        self.stopping = True

    def close_one(self) -> None:
        self.open_clients -= 1
        if self.open_clients == 0 and not self.finished.done():
            self.finished.set_result(None)

    def on_finish(self, number: int, request: Request) -> None:
        self.requests.append(request)
        if self.ended:
            return
        if self.began:
            self.in_window += 1
            if self.in_window >= self.spec.max_requests:
                self._close_window()
        else:
            self.warm.add(number)
            self._open_window_when_warm()

    def _end_warmup(self) -> None:
        self.warmup_over = True
        self._open_window_when_warm()

    def _open_window_when_warm(self) -> None:
        if self.began or self.stopping or not self.warmup_over or len(self.warm) < self.spec.clients:
            return
        write_line("begin")
        self.cpu_at_begin = own_cpu_s()
        self.began = time.perf_counter()
        self.loop.call_later(self.spec.window_s, self._close_window)

    def _close_window(self) -> None:
        if self.ended:
            return
        self.ended = time.perf_counter()
        self.cpu_s = own_cpu_s() - self.cpu_at_begin
        self.stopping = True
        write_line("end")

    def _stall(self) -> None:
        if not self.finished.done():
            self.fail(f"{self.open_clients} clients still wait {STALL_S:g} s after the window should have closed")
            self.finished.set_result(None)


class Client(asyncio.Protocol):
    """One connection with one request in flight at a time."""

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.number = number
        self.request: Request | None = None
        self.now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.answer = AnswerReader(lambda: self.now)
        self.send()

    def send(self) -> None:
        if self.run.stopping:
            self.transport.close()
            return
        data = request_bytes(self.run.spec, next(self.run.prompts))
        self.answer.begin()
        self.request = Request(started=time.perf_counter())
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self.now = time.perf_counter()
        try:
            self.answer.feed(data)
        except ConnectionError as error:
            self.give_up(str(error))
        if self.answer.complete and self.request is not None:
            self.answered(self.request)

    def answered(self, request: Request) -> None:
        answer = self.answer
        self.request = None
        request.ended = self.now
        request.stamps = answer.stamps
        request.usage = answer.usage
        request.done = answer.done
        if wrong := self.what_is_wrong(request):
            self.give_up(wrong)
            return
        self.run.on_finish(self.number, request)
        if self.answer.parser.should_keep_alive():
            self.send()
        else:
            self.transport.close()

    def what_is_wrong(self, request: Request) -> str | None:
        """Why an ended answer cannot be counted; None when it is whole."""
        if self.answer.status != 200 or self.answer.body:
            return f"status {self.answer.status}: {self.answer.body[:300]!r}"
        if not request.done or not request.stamps or request.usage is None or self.answer.splitter.pending:
            return f"answer cut short: done={request.done}, {len(request.stamps)} token events, usage={request.usage}"
        if request.usage.completion_tokens != self.run.spec.max_tokens:
            return f"{request.usage.completion_tokens} tokens where {self.run.spec.max_tokens} were asked for"
        return None

    def give_up(self, message: str) -> None:
        self.request = None
        self.run.fail(message)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.request is not None:
            self.request = None
            self.run.fail(f"connection lost in mid-answer: {exc}")
        if self.run.stopping:
            self.run.close_one()
        else:
            self.run.reconnects += 1
            self.run.connect(self.number)


def slices_of(requests: list[Request], began: float, ended: float) -> list[float]:
    """Tokens per second in equal slices of the window.

    A request's tokens are spread evenly over its token events: an event may carry several when the consumer is behind.
    """
    count = max(1, int((ended - began) / SLICE_S))
    width = (ended - began) / count
    tokens = [0.0] * count
    for request in requests:
        if request.usage is None or not request.stamps:
            continue
        weight = request.usage.completion_tokens / len(request.stamps)
        for stamp in request.stamps:
            if began <= stamp < ended:
                tokens[min(count - 1, int((stamp - began) / width))] += weight
    return [total / width for total in tokens]


def decoding_s(requests: list[Request], began: float, ended: float) -> float:
    """Request-seconds in the window between first and last token: where several decode at once, each counts."""
    overlaps = [min(r.stamps[-1], ended) - max(r.stamps[0], began) for r in requests if r.stamps]
    return sum(overlap for overlap in overlaps if overlap > 0)


def summarize(run: Run) -> dict[str, Any]:
    """The result: latencies in ms, gaps in us (one list a request), slices in tokens per second."""
    began = run.began
    ended = run.ended
    inside = [r for r in run.requests if began <= r.ended < ended]
    first_inside = [r for r in run.requests if began <= r.stamps[0] < ended]
    gaps = [
        [round((b - a) * 1e6) for a, b in zip(r.stamps, r.stamps[1:], strict=False) if began <= b < ended]
        for r in run.requests
    ]
    slices = slices_of(run.requests, began, ended) if ended else []
    return {
        "window_s": ended - began,
        "tokens": sum(slices) / len(slices) * (ended - began) if slices else 0.0,
        "tokens_per_s_slices": slices,
        "requests": len(inside),
        "decoding_s": decoding_s(run.requests, began, ended),
        "ttft_ms": [(r.stamps[0] - r.started) * 1e3 for r in first_inside],
        "latency_ms": [(r.ended - r.started) * 1e3 for r in inside],
        "gaps_us": [g for g in gaps if g],
        "cpu_s": run.cpu_s,
        "reconnects": run.reconnects,
        "errors": len(run.errors),
        "error_samples": run.errors[:MAX_ERROR_SAMPLES],
    }


def own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def drive(spec: Spec) -> dict[str, Any]:
    """Run one spec to its end in the running loop."""
    run = Run(spec, asyncio.get_running_loop())
    run.start()
    await run.finished
    if not run.ended and not run.errors:
        run.fail("all clients closed before the window did")
    return summarize(run)


def main() -> int:
    """0, or 1 when any request failed; the result is written either way."""
    spec = Spec(**json.loads(sys.stdin.read()))
    gc.disable()  # a collection would show as a gap between tokens; a run allocates some tens of megabytes
    result = uvloop.run(drive(spec))
    write_json(result)
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
