"""Kills under a batch: `python -m benchmarks.batch_crash [--quick] [--kills N] [--seed 1] [--store URL]`.

1,000 rows by the official SDK on a stack of its own: simulated engines (an answer is a function of its row), two
routers, two engine replicas, one worker. Meanwhile a worker, a router, an engine replica, the quota actor, the store's
connection (SQLite: its owner's process; PostgreSQL, with `--store`: its backends) or the files' owner is killed at 100
points drawn from the seed, 10 with `--quick`, each kind at least once. A kind is killed again only when it is back.

    missing, duplicated   rows that are in neither file of the batch, or more than once in both together [0]
    failed, wrong         rows in the error file, and rows with another answer than the undisturbed one [0]
    rerun_share           the runs beyond one for each row, over the rows, by the engines' own counters [0.05]

What a killed engine ran, and what a killed router had running, runs again: with one slot in each of two engines that is
about one row a kill. Prints conditions, progress and as its last line one JSON object; exit code 1 if the batch did not
end, or a row is missing, there twice, failed or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import openai
import requests
from rich.console import Console

from benchmarks.batch_crash.account import Account, EngineCounts, account, rerun_share
from benchmarks.batch_crash.plan import KINDS, Kill, Shape, Victim, kills_of
from benchmarks.batch_crash.victims import Victims
from benchmarks.batch_crash.watch import ReplicaWatch
from benchmarks.common.arms import BenchmarkError
from benchmarks.common.batches import OVER, PROMPT_WORDS, BatchClient, input_file, rows_of, undisturbed
from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.run import CONSOLE_WIDTH, figures_or_exit
from benchmarks.common.scaling_stack import MODEL, Stage, stack
from serve_app.settings import parse

# A row is short beside a component's return, so that few are in flight when something dies; long enough in sum that the
# batch runs until the last kill.
FULL = Shape(kills=100, slots=1, tokens=60)
QUICK = Shape(kills=10, slots=4, tokens=40)
BARS = {"missing": 0, "duplicated": 0, "rerun_share": 0.05}
BACK_S = 120.0  # of one component: an engine starts beside others on two cores
AFTER_S = 300.0  # from the last kill until the batch is over
POLL_S = 0.3
CALL_S = 15.0  # of one attempt of the SDK: what a killed router held is cut sooner
TENANT = "batch"


def configuration(shape: Shape, store_url: str | None) -> dict[str, Any]:
    """Defaults, but for the size of the engines."""
    model = {
        "name": MODEL,
        "engine": "simulated",
        "max_num_seqs": shape.slots,
        "cpus_per_rank": 0.5,
        "replicas": {"min_replicas": shape.engines, "max_replicas": shape.engines},
        "simulated": {"decode_step_s": shape.step_s},
    }
    config: dict[str, Any] = {"models": [model], "router": {"replicas": shape.routers}, "batch": {"workers": 1}}
    return config | ({"store": {"url": store_url}} if store_url else {})


@dataclass(slots=True)
class Run:
    """One batch, and what was killed under it."""

    stage: Stage
    client: BatchClient
    victims: Victims
    console: Console
    counts: EngineCounts = field(default_factory=lambda: EngineCounts(PROMPT_WORDS))
    killed: Counter[Victim] = field(default_factory=Counter)
    back_s: dict[Victim, list[float]] = field(default_factory=lambda: {victim: [] for victim in KINDS})
    batch_id: str = ""

    def under_kills(self, content: bytes, kills: Sequence[Kill]) -> openai.types.Batch:
        """The batch at its end.

        Raises:
            BenchmarkError: something did not come back within `BACK_S`.
        """
        self.batch_id = self.client.submit(content)
        for number, kill in enumerate(kills, 1):
            if not self._until_due(kill):
                self.console.print(f"the batch is over before kill {number}")
                break
            time.sleep(kill.pause_s)  # bound: a second
            self._look()
            killed = self.victims.kill(kill.victim)
            if killed is not None:
                self.killed[kill.victim] += 1
                self.console.print(f"  {number}: {kill.victim} ({killed}) after {self._done()} rows")
        deadline = time.monotonic() + AFTER_S
        while (batch := self.client.batch(self.batch_id)).status not in OVER and time.monotonic() < deadline:
            self._look()
            time.sleep(POLL_S)  # bound: AFTER_S
        for victim in KINDS:
            self._until(partial(self.victims.is_back, victim), f"{victim} is back")
        self._look()
        return batch

    def _until_due(self, kill: Kill) -> bool:
        """Wait until so many rows are done and the victim is there; False: the batch is over."""
        began = time.monotonic()
        while True:
            batch = self.client.batch(self.batch_id)
            self._look()
            if batch.status in OVER:
                return False
            if self._done(batch) >= kill.after_rows and self.victims.is_back(kill.victim):
                return True
            if time.monotonic() - began > BACK_S and self._done(batch) >= kill.after_rows:
                raise BenchmarkError(f"{kill.victim} is not back after {BACK_S:g} s")
            if time.monotonic() - began > AFTER_S:
                raise BenchmarkError(f"{self._done(batch)} rows after {AFTER_S:g} s, {kill.after_rows} wanted")
            time.sleep(POLL_S)  # bound: AFTER_S

    def _until(self, holds: Callable[[], bool], expected: str) -> None:
        deadline = time.monotonic() + BACK_S
        while not holds():
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{expected}: not within {BACK_S:g} s")
            time.sleep(POLL_S)  # bound: BACK_S

    def _done(self, batch: openai.types.Batch | None = None) -> int:
        counts = (batch or self.client.batch(self.batch_id)).request_counts
        return 0 if counts is None else counts.completed + counts.failed

    def _look(self) -> None:
        """Read the engines' counters, if a router can be asked now."""
        with contextlib.suppress(requests.RequestException):
            answer = self.stage.get("/metrics")
            if answer.status_code == 200:
                self.counts.look(answer.text)


def usage_of(stage: Stage) -> dict[str, int]:
    """What the store has of the batch's tenant."""
    answer = stage.get(f"/admin/usage?by=tenant&tenant={TENANT}")
    rows = answer.json()["data"] if answer.status_code == 200 else []
    return {name: sum(row[name] for row in rows) for name in ("requests", "unsettled")}


def measure(shape: Shape, kills: Sequence[Kill], seed: int, store_url: str | None, console: Console) -> dict[str, Any]:
    """The whole run.

    Raises:
        BenchmarkError: the stack does not come up, or something does not come back.
    """
    config = configuration(shape, store_url)
    rows = rows_of(shape.rows, (shape.tokens, shape.tokens), seed)
    expected = asyncio.run(undisturbed(rows, parse(config).models[0]))
    key = f"sk-{random.SystemRandom().getrandbits(128):032x}"
    began = time.monotonic()
    with (
        stack(config, [{"key": key, "tenant": TENANT}]) as stage,
        ReplicaWatch(stage.cluster.environment()) as watch,
        openai.OpenAI(base_url=f"{stage.cluster.url}/v1", api_key=key, timeout=CALL_S, max_retries=0) as sdk,
    ):
        console.print(f"up after {time.monotonic() - began:.0f} s", highlight=False)
        draw = random.Random(f"{seed} which")
        run = Run(stage, BatchClient(sdk), Victims(stage, watch, shape, draw, store_url), console)
        began = time.monotonic()
        batch = run.under_kills(input_file(rows, MODEL), kills)
        took_s = time.monotonic() - began
        files = [run.client.content(name) for name in (batch.output_file_id, batch.error_file_id)]
        found: Account = account(expected, *files)
        usage = usage_of(stage)
    return {
        "rows": shape.rows,
        "kills": {victim.value: run.killed[victim] for victim in KINDS},
        **found.as_json(),
        "rerun_share": rerun_share(run.counts.begun, shape.rows),
        "status": batch.status,
        "clean": found.is_clean and batch.status == "completed",
        "begun_by_engines": run.counts.begun,
        "engines_seen": run.counts.engines,
        "usage": usage,
        "seconds": round(took_s, 1),
    }


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_crash", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="10 kills instead of 100")
    parser.add_argument("--kills", type=int)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", type=Victim, choices=KINDS, help="kill these kinds alone")
    parser.add_argument("--store", metavar="URL", help="of a PostgreSQL database; without: the SQLite file")
    return parser.parse_args(arguments)


def shape_of(options: argparse.Namespace) -> Shape:
    shape = QUICK if options.quick else FULL
    fields = asdict(shape) | {
        name: value for name in ("kills", "rows") if (value := getattr(options, name)) is not None
    }
    return Shape(**fields)


def main(arguments: list[str] | None = None) -> int:
    """0 when every row is there once with its answer; 1 otherwise."""
    options = options_of(arguments)
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else CONSOLE_WIDTH)
    shape = shape_of(options)
    kills = kills_of(options.seed, shape.kills, shape.rows, options.only or KINDS)
    conditions = here(seed=options.seed, shape=asdict(shape), store="PostgreSQL" if options.store else "SQLite")
    console.print(conditions)
    with figures_or_exit(console, TimeoutError):
        result = measure(shape, kills, options.seed, options.store, console)
    write_json({**result, "bars": BARS, "conditions": conditions})
    return 0 if result["clean"] else 1
