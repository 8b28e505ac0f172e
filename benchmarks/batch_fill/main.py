"""People beside a batch: `python -m benchmarks.batch_fill [--quick] [--engine simulated|vllm] [--guard-slots-share 0.5]
[--seed 1]`.

Interactive requests (Poisson, of class `high` and `normal`) take a part of the slots; windows without a
batch and beside one take turns (A B A B), both with the same requests at the same moments. The batch has more rows than
a window needs, begins before it, and is cancelled after it.

On the simulated engine, whose step takes the same time whatever runs in it:

    interactive_p99_ratio   p99 of people's latency beside the batch over that without [1.1]
    idle_fill_share         the part of the slot-steps without people that rows fill, by the engine's counters [0.9]

On the real engine a fuller step takes longer, so what is held is the wait for the first token, of the classes for which
slots are kept free:

    first_token_added_steps   p99 of the first token of `high` beside the batch less that without, in full steps [2]

Prints conditions, progress and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

import openai
from rich.console import Console

from benchmarks.batch_fill.figures import Window, result
from benchmarks.batch_fill.load import poisson
from benchmarks.batch_fill.windows import Watched
from benchmarks.common.arms import BenchmarkError
from benchmarks.common.batches import OVER, BatchClient, input_file, rows_of
from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.priority import clients_first
from benchmarks.common.run import CONSOLE_WIDTH, figures_or_exit
from benchmarks.common.scaling_stack import MODEL, stack
from serve_app.settings import AdmissionSettings

SIMULATED = "simulated"
REAL = "vllm"
BARS = {"interactive_p99_ratio": 1.1, "idle_fill_share": 0.9, "first_token_added_steps": 2.0}
ROUNDS = 2
WINDOW_S = 60.0
QUICK_WINDOW_S = 30.0
FULL_SHARE = 0.9  # of the slots that a batch may have: it runs at its pace
FULL_S = 60.0  # until then, at most
IDLE_S = 60.0  # until nothing runs after a window, at most
TENANT = "batch"


@dataclass(frozen=True, slots=True)
class Shape:
    """The engine and the loads.

    Args:
        row_tokens: of a row, at least and at most: rows of one length that begin together end together, and whoever
            comes just after that waits for a whole row.
        people: the part of the slots that interactive requests take on average.
        ramp_s: of the load before its window: a few answers.
        request_s: what a request takes by itself, about; it sizes the rate.
        high: the part of people's requests that are `high`; the others are `normal`.
    """

    slots: int
    people_tokens: int
    row_tokens: tuple[int, int]
    people: float
    ramp_s: float
    request_s: float
    high: float
    rows: int = 4_000

    @property
    def per_s(self) -> float:
        return self.people * self.slots / self.request_s


STEP_S = 0.1  # so long that 128 slots are 32 requests a second, which two cores relay beside everything else
SHAPES = {
    SIMULATED: Shape(
        128, people_tokens=40, row_tokens=(10, 70), people=0.4, ramp_s=10.0, request_s=40 * STEP_S, high=0.2
    ),
    # Rows are long: a step of the small model takes milliseconds, and many short rows keep the other core busy outside
    # the engine. Most of people are `high`, for whom slots are kept free; a `normal` one waits for a row's end.
    REAL: Shape(16, people_tokens=16, row_tokens=(200, 600), people=0.075, ramp_s=4.0, request_s=0.15, high=0.8),
}


def configuration(engine: str, shape: Shape, guard_slots_share: float) -> dict[str, Any]:
    """Defaults, but for the engine and perhaps the guard slots."""
    model: dict[str, Any] = {"name": MODEL, "engine": engine, "max_num_seqs": shape.slots}
    if engine == REAL:
        model |= {"path": "tiny", "dtype": "float32", "max_model_len": 2048, "kv_cache_gb": 0.25}
    else:
        model |= {"simulated": {"decode_step_s": STEP_S, "kv_cache_tokens": 1_000_000}}
    return {"models": [model], "batch": {"workers": 1}, "admission": {"guard_slots_share": guard_slots_share}}


@dataclass(slots=True)
class Beside:
    """A running stack, the client of its batches, and the windows. `guard_slots`: that may be kept from the batch."""

    watched: Watched
    client: BatchClient
    shape: Shape
    guard_slots: float
    window_s: float
    is_streamed: bool

    async def window(self, seed: int) -> Window:
        """People for a ramp and a window."""
        shape = self.shape
        planned = poisson(seed, shape.per_s, shape.ramp_s + self.window_s, shape.high)
        return await self.watched.window(
            planned, shape.people_tokens, shape.ramp_s, self.window_s, stream=self.is_streamed
        )

    async def beside(self, seed: int) -> Window:
        """The same beside a batch.

        Raises:
            BenchmarkError: the batch does not fill the engine, or is over before the window is.
        """
        shape = self.shape
        rows = input_file(rows_of(shape.rows, shape.row_tokens, seed), MODEL)
        batch_id = await asyncio.to_thread(self.client.submit, rows)
        full = FULL_SHARE * (shape.slots - self.guard_slots)
        await self.watched.until_running(lambda running: running >= full, FULL_S, "the batch fills the slots")
        window = await self.window(seed)
        batch = await asyncio.to_thread(self.client.batch, batch_id)
        if batch.status in OVER:
            raise BenchmarkError(f"the batch is {batch.status} before its window is over: more rows are needed")
        await asyncio.to_thread(self.client.cancel, batch_id)
        await asyncio.to_thread(self.client.until_over, batch_id, IDLE_S)
        await self.watched.until_running(lambda running: not running, IDLE_S, "nothing runs")
        return window


async def measure(beside: Beside, seed: int, console: Console) -> dict[str, Any]:
    """All rounds, A B A B."""
    alone = list[Window]()
    filled = list[Window]()
    for number in range(ROUNDS):
        for name, windows, make in (("alone", alone, beside.window), ("beside", filled, beside.beside)):
            windows.append(await make(seed + number))
            window = windows[-1]
            used = window.after.sequences_since(window.before)
            console.print(
                f"  round {number + 1}, {name}: {len(window.answers)} requests, {used:.1f} sequences a step, "
                f"{window.step_s * 1000:.1f} ms a step"
            )
    return result(alone, filled, beside.shape.slots)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_fill", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="windows of half a minute")
    parser.add_argument("--engine", choices=(SIMULATED, REAL), default=SIMULATED)
    parser.add_argument("--window", type=float, help="seconds")
    parser.add_argument("--guard-slots-share", type=float, default=AdmissionSettings().guard_slots_share)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """0 when figures were got, whatever they are; 1 when not, or when a request failed."""
    options = options_of(arguments)
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else CONSOLE_WIDTH)
    shape = SHAPES[options.engine]
    window_s = options.window or (QUICK_WINDOW_S if options.quick else WINDOW_S)
    guard = options.guard_slots_share
    conditions = here(
        seed=options.seed, engine=options.engine, window_s=window_s, guard_slots_share=guard, shape=asdict(shape)
    )
    console.print(conditions)
    key = f"sk-{random.SystemRandom().getrandbits(128):032x}"
    with (
        figures_or_exit(console),
        stack(configuration(options.engine, shape, guard), [{"key": key, "tenant": TENANT}]) as stage,
        openai.OpenAI(base_url=f"{stage.cluster.url}/v1", api_key=key, max_retries=0) as sdk,
        clients_first() as is_first,
    ):
        console.print(f"clients run before the servers: {is_first}", highlight=False)
        beside = Beside(Watched(stage), BatchClient(sdk), shape, guard * shape.slots, window_s, options.engine == REAL)
        found = asyncio.run(measure(beside, options.seed, console))
    write_json({**found, "bars": BARS, "conditions": conditions})
    return 1 if found["failed"] else 0
