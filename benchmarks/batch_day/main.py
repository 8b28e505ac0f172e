"""A day of a batch lane in virtual time: `python -m benchmarks.batch_day [--quick] [--seed 1] [--plot FILE]`.

People ask by day (the Azure conversation trace, stretched over hours that follow the time of day), 200,000 rows in four
batches of two tenants come in the evening. One model keeps two replicas; the other is scaled to zero between its uses.
Queue, worker's numbers and scaling are the pure cores (`benchmarks.batch_day.world`); nothing runs but this process, so
what else the machine does changes nothing. Beside it the same day without batches.

Figures, by model: `idle_fill_share`, the part of the slots without people that rows used while rows were left;
`interactive_p99_ratio`, the p99 of people's latency while batches were there over that of the day without; replica
hours and the moments of each change of replicas.

Prints conditions and a table by hour, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.batch_day.figures import hours, summary
from benchmarks.batch_day.plan import MODELS, ROWS, batches, people
from benchmarks.batch_day.plot import plot
from benchmarks.batch_day.world import Model, play
from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.run import CONSOLE_WIDTH
from benchmarks.common.traces import AZURE_FILE, DATA, TraceMissingError, azure

QUICK_ROWS = 20_000
QUICK_SHARE = 0.1
BARS = {"interactive_p99_ratio": 1.1, "idle_fill_share": 0.9}


def show(console: Console, models: Mapping[str, Model]) -> None:
    """A table of each model by hour."""
    for name, model in models.items():
        columns = ("hour", "slots", "people", "rows", "idle", "asked", "wait p99 s", "rows ended")
        table = Table(*columns, title=f"{name}: slots on average, by hour")
        for hour in hours(model):
            wait = "-" if hour.wait_p99_s is None else f"{hour.wait_p99_s:.2f}"
            slots = (f"{value:.1f}" for value in (hour.slots, hour.people, hour.rows, hour.idle))
            table.add_row(f"{hour.hour:02d}:00", *slots, str(hour.asked), wait, str(hour.rows_ended))
        console.print(table)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_day", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the people and of the rows")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--data", type=Path, default=DATA, help=f"the folder with {AZURE_FILE}")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """0 when every row has ended; 1 when not, or without the trace."""
    options = options_of(arguments)
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else CONSOLE_WIDTH)
    began = time.monotonic()
    rows, share = (QUICK_ROWS, QUICK_SHARE) if options.quick else (ROWS, 1.0)
    conditions = here(seed=options.seed, rows=rows, share_of_people=share)
    console.print(conditions)
    try:
        trace = azure(options.data, random.Random(options.seed))
    except TraceMissingError as missing:
        console.print(f"skipped: {missing}")
        return 1
    asked = people(trace, options.seed, share)
    with_rows = play(MODELS, asked, batches(trace, options.seed, rows))
    without = play(MODELS, asked, [])
    show(console, with_rows)
    if options.plot:
        plot(with_rows, options.plot)
    found: dict[str, Any] = summary(with_rows, without)
    write_json({**found, "bars": BARS, "seconds": round(time.monotonic() - began), "conditions": conditions})
    return 0 if found["rows_ended"] == found["rows"] else 1
