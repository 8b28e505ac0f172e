"""What learned estimates save: `python -m benchmarks.estimate [--quick] [--data FOLDER]`.

Workloads are replayed in order. Every request is estimated when it arrives, from its tenant, its size in bytes and what
has ended by then; an answer ends after its tokens at `ITL_S` each, and is learned from at that moment.

    azure      a production chat service's hour, one tenant
    mooncake   another service's conversations, one tenant
    both       the two as tenants of one model, their requests interleaved: do they spoil each other?

Traces have no texts: a prompt's bytes are its tokens times 4.2, lognormal with a sigma of 0.15.

Arms: `fixed_256` for every answer; `learned`, at the default quantile. Figures: `covered`, the share of requests whose
answer was no longer than estimated; `least_covered`, the same of the worst tenth of the run; `idle` and `missing`,
tokens a request that were estimated and not used, or the reverse; both as shares of all that was reserved, prompts
included.

Prints conditions, tables, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.traces import (
    DATA,
    MODEL,
    Request,
    TraceMissingError,
    azure,
    mooncake,
)
from serve_app.core.body_bounds import BYTES_PER_TOKEN
from serve_app.core.estimate import DEFAULT_QUANTILE, Estimator, ObservedUse

FIXED_TOKENS = 256  # of an answer, for all, until estimates are learned
ITL_S = 0.03  # of an 8B model under load, about
QUICK_REQUESTS = 3_000  # of each workload
PARTS = 10


@dataclass(frozen=True, slots=True)
class Result:
    """What an arm did on a workload, per request; see the module. `us`: CPU of an estimate and its observation."""

    covered: float
    least_covered: float
    idle: float
    missing: float
    idle_share: float
    missing_share: float
    prompt_error: float
    us: float


def workloads(folder: Path, seed: int, most: int | None) -> dict[str, list[Request]]:
    """All of them, each in order of arrival.

    Raises:
        TraceMissingError: a trace is not in the folder.
    """
    draw = random.Random(seed)
    of_azure = azure(folder, draw)[:most]
    other = mooncake(folder, draw)[:most]
    return {
        "azure": of_azure,
        "mooncake": other,
        "both": sorted([*of_azure, *other], key=lambda each: each.at_s),
    }


Guess = Callable[[Request], tuple[int, int]]
Learn = Callable[[Request], None]


def replay(requests: Sequence[Request], guess: Guess, learn: Learn) -> Result:
    """Estimate every request at its arrival; `learn` from each when it ends."""
    running: list[tuple[float, int, Request]] = []
    order = itertools.count()
    outputs = []
    prompts = []
    began = time.process_time()
    for incoming in requests:
        while running and running[0][0] <= incoming.at_s:
            learn(heapq.heappop(running)[2])
        prompt, output = guess(incoming)
        prompts.append(prompt)
        outputs.append(output)
        heapq.heappush(running, (incoming.at_s + incoming.output_tokens * ITL_S, next(order), incoming))
    us = (time.process_time() - began) / len(requests) * 1e6
    return judge(requests, prompts, outputs, us)


def judge(requests: Sequence[Request], prompts: Sequence[int], outputs: Sequence[int], us: float) -> Result:
    """Figures of estimates against what happened."""
    count = len(requests)
    fits = [one.output_tokens <= output for one, output in zip(requests, outputs, strict=True)]
    over = [output - one.output_tokens for one, output in zip(requests, outputs, strict=True)]
    idle = sum(max(0, tokens) for tokens in over)
    missing = sum(max(0, -tokens) for tokens in over)
    reserved = sum(prompts) + sum(outputs)
    errors = [abs(p - one.prompt_tokens) / max(1, one.prompt_tokens) for one, p in zip(requests, prompts, strict=True)]
    step = max(1, count // PARTS)
    parts = [fmean(fits[start : start + step]) for start in range(0, count - step + 1, step)]
    return Result(
        covered=round(fmean(fits), 4),
        least_covered=round(min(parts), 4),
        idle=round(idle / count, 1),
        missing=round(missing / count, 1),
        idle_share=round(idle / reserved, 4),
        missing_share=round(missing / reserved, 4),
        prompt_error=round(median(errors), 4),
        us=round(us, 1),
    )


def constant(tokens: int) -> Guess:
    """The same answer for all, and today's ratio."""
    return lambda request: (-(-request.prompt_bytes // BYTES_PER_TOKEN), tokens)


def learned(requests: Sequence[Request]) -> Result:
    """Ours."""
    learner = Estimator(DEFAULT_QUANTILE)

    def guess(request: Request) -> tuple[int, int]:
        found = learner.estimate(request.tenant, MODEL, request.prompt_bytes)
        return found.prompt_tokens, found.output_tokens

    def learn(request: Request) -> None:
        learner.observe(
            ObservedUse(request.tenant, MODEL, request.prompt_bytes, request.prompt_tokens, request.output_tokens)
        )

    return replay(requests, guess, learn)


def compare(requests: Sequence[Request]) -> dict[str, Result]:
    """Every arm on one workload."""
    return {"fixed_256": replay(requests, constant(FIXED_TOKENS), lambda _: None), "learned": learned(requests)}


def show(console: Console, name: str, results: dict[str, Result]) -> None:
    """A workload's table."""
    columns = ("covered", "worst tenth", "idle", "missing", "idle share", "missing share", "prompt error", "us")
    table = Table("arm", *columns, title=name)
    for arm, r in results.items():
        shares = (f"{r.idle_share:.1%}", f"{r.missing_share:.1%}", f"{r.prompt_error:.1%}", f"{r.us:g}")
        table.add_row(arm, f"{r.covered:.1%}", f"{r.least_covered:.1%}", f"{r.idle:g}", f"{r.missing:g}", *shares)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK_REQUESTS} requests of each workload")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=DATA, help="where the traces are")
    options = parser.parse_args()
    console = Console(stderr=True, width=130)
    conditions = here(seed=options.seed)
    console.print(conditions)
    try:
        found = workloads(options.data, options.seed, QUICK_REQUESTS if options.quick else None)
    except TraceMissingError as missing:
        raise SystemExit(f"skipped: {missing}") from missing
    results = {name: compare(requests) for name, requests in found.items()}
    for name, by_arm in results.items():
        show(console, f"{name}: {len(found[name])} requests", by_arm)
    plain = {name: {arm: asdict(one) for arm, one in by_arm.items()} for name, by_arm in results.items()}
    write_json({"default_quantile": DEFAULT_QUANTILE, "workloads": plain, "conditions": conditions})


if __name__ == "__main__":
    main()
