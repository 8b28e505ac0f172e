"""`high` beside a full engine: `python -m benchmarks.preemption [--quick] [--engine vllm|simulated] [--seed 1]`.

Requests of class `high` (Poisson, streamed) come while nothing else runs, and while streams and whole answers of class
`low` hold every slot and more of them wait; these windows take turns (A B A B). No slot is kept free for `high`
(`admission.guard_slots_share` is 0), so `low` has to stop for it, and goes on later.

    high_ttft_p99_excess_ms   p99 of the first token of `high` beside `low` less that alone [two_steps_ms + 100]
    two_steps_ms              two steps of the full engine
    preempted                 requests of class `low` that were stopped [20 at least]
    wrong                     answers of class `low` that differ from the undisturbed ones, taken before, or failed [0]
    recomputed_share          of all computed tokens those computed before [0.10]; cache hits are not computed

An answer ends long before a quantum, so what quanta compute again is not in it. Prints conditions, progress, a table
and as its last line one JSON object; exit code 1 if a request failed or an answer is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.batch_fill.figures import Window
from benchmarks.batch_fill.load import poisson
from benchmarks.batch_fill.windows import Watched
from benchmarks.common.arms import BenchmarkError
from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.priority import clients_first
from benchmarks.common.run import CONSOLE_WIDTH, figures_or_exit
from benchmarks.common.scaling_stack import MODEL, Stage, stack
from benchmarks.preemption.figures import (
    EXTRA_MS,
    MAX_RECOMPUTED,
    MIN_PREEMPTED,
    LowRound,
    TokenCounters,
    result,
    verdicts,
)
from benchmarks.preemption.low_load import Completion, LowAnswer, LowClients, Question, questions_of, undisturbed

SIMULATED = "simulated"
REAL = "vllm"
ROUNDS = 2
WINDOW_S = 60.0
QUICK_WINDOW_S = 24.0
RAMP_S = 3.0  # of the load before its window: some answers
FULL_SHARE = 0.9  # of the slots: the engine is full
# until it is, and until nothing runs, at most
FULL_S = 30.0
IDLE_S = 60.0
BLOCK_TOKENS = 32  # of vLLM's KV blocks, near a GPU's 16; its own choice on a CPU, 128, is what no GPU has
UNDISTURBED_AT_ONCE = 8  # so that they take seconds; fewer than slots, so that none is stopped or waits


@dataclass(frozen=True, slots=True)
class Shape:
    """The engine and the loads.

    Args:
        waiting: clients of class `low` beyond the slots.
        questions: of `low`; no client may come to ask all of them.
        low_tokens: of an answer of class `low`, at least and at most.
        high_per_s: requests of class `high` a second; high_tokens: of each answer.
    """

    slots: int
    waiting: int
    questions: int
    low_tokens: tuple[int, int]
    high_per_s: float
    high_tokens: int

    @property
    def clients(self) -> int:
        return self.slots + self.waiting


STEP_S = 0.02
SHAPES = {
    SIMULATED: Shape(32, waiting=4, questions=64, low_tokens=(100, 300), high_per_s=8.0, high_tokens=10),
    REAL: Shape(16, waiting=4, questions=48, low_tokens=(200, 600), high_per_s=8.0, high_tokens=16),
}


def configuration(engine: str, shape: Shape) -> dict[str, Any]:
    """Defaults, but for the engine and the guard slots."""
    model: dict[str, Any] = {"name": MODEL, "engine": engine, "max_num_seqs": shape.slots}
    if engine == REAL:
        model |= {"path": "tiny", "dtype": "float32", "max_model_len": 2048, "kv_cache_gb": 0.25}
        model |= {"extra_engine_args": {"block_size": BLOCK_TOKENS}}
    else:
        model |= {"simulated": {"decode_step_s": STEP_S, "kv_cache_tokens": 1_000_000}}
    return {"models": [model], "admission": {"guard_slots_share": 0.0}}


class Measurement:
    """A running stack, its clients and the windows.

    Args:
        keys: of the clients of class `low`, one for each.
        right: the undisturbed answers, by question.
    """

    def __init__(
        self,
        stage: Stage,
        shape: Shape,
        window_s: float,
        keys: list[str],
        questions: list[Question],
        right: dict[int, Completion],
    ) -> None:
        self._stage = stage
        self._watched = Watched(stage)
        self._shape = shape
        self._window_s = window_s
        self._right = right
        self._low = LowClients(stage.cluster.url, keys, questions, f"low-{random.SystemRandom().getrandbits(32):x}")
        self.alone = list[Window]()
        self.beside = list[Window]()
        self.rounds = list[LowRound]()

    async def measure(self, seed: int, console: Console) -> dict[str, Any]:
        """All rounds, A B A B."""
        for number in range(ROUNDS):
            self.alone.append(await self._window(seed + number))
            _tell(console, number, "alone", self.alone[-1])
            await self._beside(seed + number)
            low = self.rounds[-1]
            more = f", {len(low.answers)} of low, {sum(low.preempted.values())} stops"
            _tell(console, number, "beside", self.beside[-1], more)
        return result(self.alone, self.beside, self.rounds, self._right)

    async def _window(self, seed: int) -> Window:
        """`high` for a ramp and a window."""
        shape = self._shape
        planned = poisson(seed, shape.high_per_s, RAMP_S + self._window_s, high=1.0)
        return await self._watched.window(planned, shape.high_tokens, RAMP_S, self._window_s, stream=True)

    async def _beside(self, seed: int) -> None:
        """The same while `low` holds every slot."""
        full = FULL_SHARE * self._shape.slots
        before = TokenCounters.of(await asyncio.to_thread(self._watched.metrics))
        self._low.start()
        await self._watched.until_running(lambda running: running >= full, FULL_S, "every slot is taken")
        self.beside.append(await self._window(seed))
        answers = await self._low.stop()
        await self._watched.until_running(lambda running: not running, IDLE_S, "nothing runs")
        computed = TokenCounters.of(await asyncio.to_thread(self._watched.metrics)).since(before)
        preempted = await asyncio.to_thread(lambda: {one.request_id: self._preempted(one) for one in answers})
        self.rounds.append(LowRound(answers, preempted, computed))

    def _preempted(self, answer: LowAnswer) -> int:
        """How often a request was stopped, by its receipt."""
        receipt = self._stage.get(f"/admin/requests/{answer.request_id}")
        return int(receipt.json()["preempted"]) if receipt.status_code == 200 else 0


def _tell(console: Console, number: int, name: str, window: Window, more: str = "") -> None:
    used = window.after.sequences_since(window.before)
    console.print(
        f"  round {number + 1}, {name}: {len(window.answers)} of high, {used:.1f} sequences a step, "
        f"{window.step_s * 1000:.1f} ms a step{more}"
    )


def table_of(found: dict[str, Any]) -> Table:
    """The figures with bars, and the parts of the first token."""
    table = Table("figure", "measured", "bar", "")
    bars = {
        "high_ttft_p99_excess_ms": f"{found['two_steps_ms'] + EXTRA_MS:.1f}",
        "preempted": f">= {MIN_PREEMPTED}",
        "wrong": "0",
        "recomputed_share": f"< {MAX_RECOMPUTED}",
    }
    for name, is_met in verdicts(found).items():
        table.add_row(name, str(found[name]), bars[name], "met" if is_met else "missed")
    for name, first in found["first_token"].items():
        for level, parts in first.items():
            for part in ("all", "late", "queue", "engine", "outside"):
                spans = parts if part == "all" else parts[part]
                quantiles = ", ".join(f"{1000 * spans[f'p{q}_s']:.0f}" for q in (50, 95, 99))
                table.add_row(f"first token of {level} {name}, {part}", f"{quantiles} ms", "", "p50, p95, p99")
    return table


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preemption", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short windows, about two minutes in all")
    parser.add_argument("--engine", choices=(SIMULATED, REAL), default=REAL)
    parser.add_argument("--window", type=float, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


async def _measured(
    stage: Stage, keys: list[str], shape: Shape, window_s: float, seed: int, console: Console
) -> dict[str, Any]:
    first, *others = keys
    questions = questions_of(shape.questions, shape.low_tokens, seed)
    try:
        right = await undisturbed(stage.cluster.url, first, questions, UNDISTURBED_AT_ONCE)
    except* (OSError, ValueError) as failed:
        raise BenchmarkError(str(failed.exceptions[0])) from failed
    console.print(f"  {len(right)} undisturbed answers")
    return await Measurement(stage, shape, window_s, others, questions, right).measure(seed, console)


def main(arguments: list[str] | None = None) -> int:
    """0 when figures were got, whatever they are; 1 when not, when a request failed or an answer is wrong."""
    options = options_of(arguments)
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else CONSOLE_WIDTH)
    shape = SHAPES[options.engine]
    window_s = options.window or (QUICK_WINDOW_S if options.quick else WINDOW_S)
    conditions = here(
        seed=options.seed,
        engine=options.engine,
        window_s=window_s,
        shape=asdict(shape),
        block_size=BLOCK_TOKENS,
    )
    console.print(conditions)
    keys = [f"sk-{random.SystemRandom().getrandbits(128):032x}" for _ in range(shape.clients + 1)]
    tenants = [{"key": key, "tenant": f"low{number}"} for number, key in enumerate(keys)]
    with (
        figures_or_exit(console),
        stack(configuration(options.engine, shape), tenants) as stage,
        clients_first() as is_first,
    ):
        console.print(f"clients run before the servers: {is_first}", highlight=False)
        found = asyncio.run(_measured(stage, keys, shape, window_s, options.seed, console))
    console.print(table_of(found))
    write_json({**found, "met": verdicts(found), "conditions": conditions})
    return 1 if found["failed"] or found["wrong"] else 0
