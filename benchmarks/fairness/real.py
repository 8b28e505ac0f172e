"""Two clients in overload on the real engine, through the whole stack: HTTP, keys, line, router, vLLM.

One stack has four keys: two of different tenants, and two of one tenant, which is how `fifo` is had here. An arm is an
open loop: requests come by a seeded Poisson clock, demand 1:2, whether answers come or not, each on a connection of its
own; when the time is over those that are left are hung up on, and the next arm begins once a request gets through.
Both arms get the same requests; rounds alternate which comes first. What the stack serves is measured first, in a
closed loop. Output lengths are drawn; the line knows no more of them than each request's own `max_tokens`.

Invariant: an answer that is not 200, or ends too early, fails the run.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.common.arms import HOST, OURS, Arm, BenchmarkError, ModelChoice, start
from benchmarks.common.sse import AnswerReader
from benchmarks.common.stats import shorten
from benchmarks.common.traces import Request
from benchmarks.common.workload import post
from benchmarks.fairness.metric import WINDOW_S, Answer, Span, judge, service_ratio, tokens_per_s
from benchmarks.fairness.trace import BACKLOG, HEAVY, LIGHT, Lengths, two_clients
from serve_app.engine import ensure_tiny_model

FIFO_ARM = "fifo"
FAIR_ARM = "ours"
TENANTS = {FIFO_ARM: {LIGHT: "everybody", HEAVY: "everybody"}, FAIR_ARM: {LIGHT: LIGHT, HEAVY: HEAVY}}
SLOTS = 4  # few, so that the overload is hundreds of waiting connections and not thousands
CLOSED = 3 * SLOTS  # clients of the closed loop: some always wait
PROMPT_TOKENS = (16, 128)
OUTPUT_TOKENS = (64, 384)
TOKEN_IDS = (16, 240)  # of plain bytes in the built-in model's vocabulary
LENGTHS = 512  # drawn once; requests draw from them
ADMISSION = {"max_queued": 100_000, "max_queued_tokens": None, "max_wait_s": 3600.0}  # nobody is refused
READ_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class RealPlan:
    """Seconds of each arm, the first of which are not counted; how often both are run; seconds of the closed loop."""

    length_s: float
    warm_s: float
    rounds: int
    capacity_s: float


REAL = RealPlan(length_s=75.0, warm_s=10.0, rounds=1, capacity_s=12.0)
QUICK_REAL = RealPlan(length_s=16.0, warm_s=4.0, rounds=1, capacity_s=6.0)


class Call:
    """One streamed completion on a connection of its own; says what it has got so far at any moment."""

    def __init__(self, request: Request, began: float) -> None:
        self.request = request
        self._read = AnswerReader(lambda: time.perf_counter() - began)

    async def run(self, port: int, key: str, body: dict[str, Any]) -> None:
        """To the end of the answer. BenchmarkError: it is none, or not whole."""
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(post(f"{HOST}:{port}", "/v1/completions", key, body, connection="close"))
            while data := await reader.read(READ_BYTES):
                self._read.feed(data)
                if self._read.status != 200 or self._read.body:
                    raise BenchmarkError(f"status {self._read.status}: {data[-500:]!r}")
        finally:
            writer.close()
        if not self._read.done:
            raise BenchmarkError("an answer ended too early")

    def answer(self) -> Answer:
        """As it stands."""
        request = self.request
        stamps = self._read.stamps
        # a frame may carry more than one token, which its end sets right
        served = request.output_tokens if self._read.done else min(len(stamps), request.output_tokens)
        first, seen = (stamps[0], stamps[-1]) if stamps else (None, None)
        return Answer(request.tenant, request.at_s, request.prompt_tokens, request.output_tokens, first, seen, served)


class Loader:
    """Sends requests to a running stack."""

    def __init__(self, port: int, keys: Mapping[str, str], model: str, seed: int) -> None:
        self._port = port
        self._keys = keys
        self._model = model
        self._draw = random.Random(seed)

    async def closed(
        self, lengths: list[Lengths], length_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> float:
        """Requests a second that `CLOSED` clients without pause get through; the first third is not counted."""
        began = clock()
        ended = 0

        async def client() -> None:
            nonlocal ended
            while (at_s := clock() - began) < length_s:
                each = self._draw.choice(lengths)
                await self._ask(Call(Request(at_s, LIGHT, 0, each.prompt, each.output), began))
                ended += length_s / 3 <= clock() - began < length_s

        async with asyncio.TaskGroup() as group:
            for _ in range(CLOSED):
                group.create_task(client())
        return ended / (length_s * 2 / 3)

    async def open(self, requests: list[Request], over: Coroutine[Any, Any, Any]) -> list[Answer]:
        """The requests at their times, and how they stand when `over` (begun with them) ends; then nobody waits."""
        began = time.perf_counter()
        calls = []
        async with asyncio.TaskGroup() as group:
            ending = group.create_task(over)
            tasks = []
            for request in requests:
                await asyncio.sleep(max(0.0, began + request.at_s - time.perf_counter()))
                calls.append(Call(request, began))
                tasks.append(group.create_task(self._ask(calls[-1])))
            await ending
            found = [call.answer() for call in calls]
            for task in tasks:
                task.cancel()
        await self._ask(Call(Request(0.0, LIGHT, 0, 8, 1), time.perf_counter()))
        return found

    async def _ask(self, call: Call) -> None:
        prompt = [self._draw.randrange(*TOKEN_IDS) for _ in range(call.request.prompt_tokens)]
        tokens = call.request.output_tokens
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        await call.run(self._port, self._keys[call.request.tenant], body)


def drawn_lengths(seed: int) -> list[Lengths]:
    """Of requests that the built-in model serves."""
    draw = random.Random(seed)
    return [Lengths(draw.randint(*PROMPT_TOKENS), draw.randint(*OUTPUT_TOKENS)) for _ in range(LENGTHS)]


async def measure(arm: Arm, keys: Mapping[str, Mapping[str, str]], model: str, plan: RealPlan, seed: int,
                  console: Console) -> tuple[float, dict[str, list[dict[str, float]]]]:  # fmt: skip
    """Requests a second that the stack serves, and the figures of each arm by round."""
    lengths = drawn_lengths(seed)
    per_s = await Loader(arm.port, keys[FIFO_ARM], model, seed).closed(lengths, plan.capacity_s)
    console.print(f"  the stack ends {per_s:.2f} requests/s")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in TENANTS}
    for number in range(plan.rounds):
        requests = two_clients(seed + number, lengths, BACKLOG * per_s, plan.length_s)
        for name in list(TENANTS)[:: -1 if number % 2 else 1]:
            answers = await Loader(arm.port, keys[name], model, seed).open(requests, asyncio.sleep(plan.length_s))
            found[name].append(figures(answers, plan))
            console.print(f"  {name}, round {number + 1}: {found[name][-1]}")
    return per_s, found


def figures(answers: list[Answer], plan: RealPlan) -> dict[str, float]:
    """Of one arm in one round; VTC's difference where there is room for its windows."""
    span = Span(plan.warm_s, plan.length_s)
    found = {"service_ratio": service_ratio(answers, span), "tokens_per_s": tokens_per_s(answers, span)}
    if span.length_s >= WINDOW_S:
        found["max_diff_over_rate"] = judge(answers, span).max_diff_over_rate
    return {key: shorten(value) for key, value in found.items()}


def on_vllm(plan: RealPlan, seed: int, console: Console) -> dict[str, Any]:
    """The run on a stack of its own.

    Raises:
        BenchmarkError: the stack did not start, or a request failed.
    """
    model = ModelChoice(path=str(ensure_tiny_model()), max_num_seqs=SLOTS)
    keys = {name: {client: secrets.token_hex(16) for client in tenants} for name, tenants in TENANTS.items()}
    further = [
        {"key": keys[name][client], "tenant": tenant}
        for name, by_client in TENANTS.items()
        for client, tenant in by_client.items()
    ]
    folder = Path(tempfile.mkdtemp(prefix="serve-bench-"))
    arm: Arm | None = None
    try:
        arm = start(OURS, model, folder, keys=further, admission=ADMISSION)
        console.print(f"  up after {arm.start_s:.0f} s on port {arm.port}")
        per_s, found = asyncio.run(measure(arm, keys, model.name, plan, seed, console))
    except* (BenchmarkError, OSError, ValueError) as errors:
        raise BenchmarkError(f"{errors.exceptions[0]}; logs are in {folder}") from None
    finally:
        if arm is not None:
            arm.stop()
    shutil.rmtree(folder)  # only after a success: a failure's logs are worth keeping
    speeds = {name: median(one["tokens_per_s"] for one in rounds) for name, rounds in found.items()}
    return {
        "service_ratio": median(one["service_ratio"] for one in found[FAIR_ARM]),
        "fifo_service_ratio": median(one["service_ratio"] for one in found[FIFO_ARM]),
        "throughput_over_fifo": shorten(speeds[FAIR_ARM] / speeds[FIFO_ARM]),
        "arms": found,
        "capacity_requests_per_s": shorten(per_s),
        "overload": BACKLOG,
        "seed": seed,
        "plan": asdict(plan),
    }
