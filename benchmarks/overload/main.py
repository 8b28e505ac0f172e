"""What overload does to those who matter: `python -m benchmarks.overload [--quick] [--plot FILE]`.

Open loop at 0.5, 1, 2, 3 and 4 times the capacity that vLLM's own server has in a closed loop, on the real engine. A
tenth of the requests is `high`, four tenths `normal`, half `low`, from four tenants, with lengths from the Azure
conversation trace scaled to a mean answer of 128 tokens (`benchmarks.overload.offered_load`). EngineCore has one core,
everything else the other. Arms, each with the same requests at the same moments:

    vllm       vLLM's own server with as many slots; it knows no classes and reads no deadline
    ours       this stack: clients name class and deadline (`benchmarks.overload.plan` says which, and their patience)
    fifo       this stack with its line replaced by first come, first served: one class, one tenant, no deadline, no
               bound, so nobody is refused and nobody passes another; engine, slots and routers are the same

Figures (see `benchmarks.overload.answers`): `high_ttft_p99_ratio_4x`, p99 of the first token of `high` at 4x over that
at 0.5x, over all who asked, or `too_few` where fewer than 300 asked (of p90s, `high_ttft_p90_ratio_4x`, 30; `high_4x`
is what can be told of any number); `goodput_4x_over_peak`, output tokens/s of requests finished within both levels at
4x over the best of any load; `refusal_p99_ms`, at the router, from a request's arrival to the decision, of those
refused on arrival; `abandoned_token_share`, the part of the engine's output tokens at 4x made for requests that did not
finish, by the engine's own counter; `low_granted_share_4x`, the part of the granted tokens that `low` had;
`attainment`, the share of all offered requests within both levels (a refusal is a miss).

`ours` is measured in rounds, each with all multiples, and what is told of a multiple is of all its rounds together:
what the speed of the machine does in the meantime it does to all of them.

With `--url` any OpenAI-compatible endpoint is measured instead (`benchmarks.overload.endpoint`).

Prints conditions, progress and tables, and as its last line one JSON object. With `--raw` each window is kept in a file
and not measured again where the folder has it: a run can be interrupted, and go on.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import conditions
from benchmarks.common.arms import VLLM, BenchmarkError, ModelChoice
from benchmarks.common.output import write_json
from benchmarks.common.run import CONSOLE_WIDTH
from benchmarks.common.stage import on_terminate
from benchmarks.common.stats import lower_quantile
from benchmarks.common.traces import TraceMissingError
from benchmarks.overload import endpoint
from benchmarks.overload.answers import Answer, Window
from benchmarks.overload.deep_model import deepened
from benchmarks.overload.offered_load import lengths
from benchmarks.overload.open_loop_client import Ended
from benchmarks.overload.plan import CAPACITY, CLOSED_FACTOR, MAX_MODEL_LEN, UNLOADED, Levels, Plan, plan_of
from benchmarks.overload.plan import parse_arguments as parse
from benchmarks.overload.plot import plot
from benchmarks.overload.report import build, print_tables, progress_line
from benchmarks.overload.stage import Theatre
from serve_app.engine import default_root, ensure_tiny_model

LEVELS_FILE = "levels.json"
CONDITIONS_FILE = "conditions.json"


class Kept:
    """What was measured, in a folder.

    Args:
        folder: holds one file a window.
        facts: the conditions now; a folder of another plan is refused.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        known = self._read(CONDITIONS_FILE)
        for name in ("plan", "model"):
            fact, known_fact = (json.loads(json.dumps(of[name] if of else None)) for of in (facts, known))
            if known_fact is not None and _without_arms(fact) != _without_arms(known_fact):
                raise BenchmarkError(f"{folder} is of another {name}: {known_fact}")
        if known is None:
            self._write(CONDITIONS_FILE, facts)
        self.conditions = known or facts

    @property
    def levels(self) -> Levels | None:
        found = self._read(LEVELS_FILE)
        return None if found is None else Levels(*found)

    def keep_levels(self, levels: Levels) -> None:
        self._write(LEVELS_FILE, astuple(levels))

    def window(self, arm: str, multiple: float, part: int) -> Window | None:
        found = self._read(_file(arm, multiple, part))
        return None if found is None else Window.of(found)

    def keep(self, raw: dict[str, Any]) -> Window:
        self._write(_file(raw["arm"], raw["multiple"], raw["round"]), raw)
        return Window.of(raw)

    def _read(self, name: str) -> Any:
        file = self._folder / name
        return json.loads(file.read_text()) if file.exists() else None

    def _write(self, name: str, value: Any) -> None:
        """Whole or not at all: a run may be ended in the middle of it."""
        draft = self._folder / f".{name}"
        draft.write_text(json.dumps(value))
        draft.rename(self._folder / name)


def _file(arm: str, multiple: float, part: int) -> str:
    return f"{arm}-{multiple:g}.json" if not part else f"{arm}-{multiple:g}-{part}.json"


def _without_arms(value: Any) -> Any:
    return {name: part for name, part in value.items() if name != "arms"} if isinstance(value, dict) else value


def find_levels(theatre: Theatre, plan: Plan) -> Levels:
    """The unloaded latencies and the capacity of vLLM's own server, each in a closed loop."""
    unloaded = ended_inside(theatre.closed(VLLM, UNLOADED, 1, plan.closed_s, plan.seed))
    clients = CLOSED_FACTOR * plan.max_num_seqs
    full = ended_inside(theatre.closed(VLLM, CAPACITY, clients, plan.closed_s, plan.seed + 1))
    return levels_of(unloaded, full, plan.closed_s)


def levels_of(unloaded: Sequence[Answer], full: Sequence[Answer], span_s: float) -> Levels:
    """The levels of what finished in two closed loops: of one client, and of more than there are slots.

    Raises:
        BenchmarkError: nothing finished in one of them.
    """
    first_s = lower_quantile([one.first_s for one in unloaded if one.first_s is not None], 0.5)
    gap_ms = lower_quantile([one.gap_ms for one in unloaded if one.gap_ms is not None], 0.5)
    if first_s is None or gap_ms is None or not full:
        raise BenchmarkError("nothing finished in a closed loop")
    return Levels(first_s, gap_ms, len(full) / span_s)


def ended_inside(raw: dict[str, Any]) -> list[Answer]:
    """Those that finished while the window of a closed loop was open."""
    begin_s = raw["warmup_s"]
    end_s = raw["warmup_s"] + raw["window_s"]
    answers = map(Answer.of, raw["rows"])
    return [a for a in answers if a.outcome is Ended.FINISHED and begin_s <= a.at_s + a.ended_s < end_s]


def run(theatre: Theatre, plan: Plan, kept: Kept, console: Console) -> tuple[list[Window], Levels]:
    """All windows of the plan.

    Raises:
        BenchmarkError: a server did not start, or the levels are not known and vLLM's arm is not among those to run.
    """
    levels = kept.levels
    windows = dict[tuple[str, float], list[Window]]()
    if levels is None:
        levels = find_levels(theatre, plan)
        kept.keep_levels(levels)
    console.print_json(data=levels.as_json())
    plan = plan.sized(levels)
    console.print(f"  windows of ours by multiple, seconds: {plan.as_json()['window_s']}", highlight=False)
    for arm in plan.arms:
        for multiple, span_s, part in plan.windows(arm):
            window = kept.window(arm, multiple, part)
            if window is None:
                window = kept.keep(theatre.window(arm, multiple, span_s, part, levels))
            windows.setdefault((arm, multiple), []).append(window)
            console.print("  " + progress_line(window), markup=False)
    return [Window.pooled(parts) for parts in windows.values()], levels


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when figures were got, whatever they are; 1 when they could not be, or requests failed."""
    options = parse(sys.argv[1:] if arguments is None else arguments, str(__doc__))
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else CONSOLE_WIDTH)
    if options.target is not None:
        try:
            return endpoint.run(endpoint.plan_of(options), options, console)
        except BenchmarkError as error:
            console.print(f"failed: {error}", style="red", markup=False)
            return 1
    plan = plan_of(options)
    began = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        console.print("two cores are needed")
        return 1
    signal.signal(signal.SIGTERM, on_terminate)
    path = deepened(ensure_tiny_model(), plan.depth, default_root())
    model = ModelChoice(str(path), max_model_len=MAX_MODEL_LEN, max_num_seqs=plan.max_num_seqs)
    folder = Path(tempfile.mkdtemp(prefix="serve-bench-"))
    theatre = Theatre(model, folder, console, plan, (cores[0], cores[1]))
    try:
        lengths(options.data, model.max_model_len)
        kept = Kept(options.raw or folder / "raw", conditions.collect(model, plan.as_json(), []))
        console.print_json(data=kept.conditions)
        windows, levels = run(theatre, plan, kept, console)
    except (BenchmarkError, TraceMissingError) as error:
        console.print(f"failed: {error}\nlogs are in {folder}", style="red", markup=False)
        return 1
    finally:
        theatre.close()
    facts = kept.conditions | {
        "seconds": round(time.monotonic() - began),
        "cores": {"engine": cores[0], "all_else": cores[1]},
    }
    result = build(windows, levels, facts)
    print_tables(console, result)
    if options.plot:
        plot(result, options.plot)
    write_json(result)
    failed = sum(window.raw["failed"] for window in windows)
    if failed:
        console.print(f"{failed} requests failed; logs are in {folder}", style="red", markup=False)
        return 1
    shutil.rmtree(folder)  # only after a success: a failure's logs are worth keeping
    return 0
