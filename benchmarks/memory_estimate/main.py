"""Memory granted against memory taken: `python -m benchmarks.memory_estimate [--quick] [NAME ...]`.

Shallow models of real shapes are written to a temporary folder, each is started on the CPU by the code of an engine
replica, loaded with its longest step, a full batch and a grammar, and measured every 0.2 s. Then once more, as its
second start: it is granted what stood for half a minute after the load of the first, or what that load reached, as if
it had recurred.

Figures of a rank without its KV cache. Bars: `estimated` / `measured` from 1 to 1.5; on the second start, granted /
measured from 0.9 to 1.1. A shape that does not start is reported with its reason, and the others go on.

Prints conditions, a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.memory_estimate.shapes import SHAPES, Shape, write
from serve_app.engine.start import memory_history, memory_size
from serve_app.settings import GB

ENGINE_S = 900.0  # of one engine; half a minute to two on two idle cores
# the bars
MOST_RATIO = 1.5
AGAIN_SHARE = 0.1
QUICK = ("tiny", "large vocabulary", "long steps")
WORDS = 300  # of the reason why an engine did not start


class NotStartedError(Exception):
    """An engine did not start, or did not take its load; the message is the end of what it said."""


def measure(shape: Shape, folder: Path) -> dict[str, Any]:
    """One start of a shape, see `benchmarks.memory_estimate.engine`; the first of a folder finds nothing compiled, as
    on a new machine. Raises NotStartedError."""
    caches = {name: str(folder.parent / "caches") for name in ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")}
    command = [sys.executable, "-m", "benchmarks.memory_estimate.engine", str(folder), json.dumps(asdict(shape))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ENGINE_S, env=os.environ | caches
        )
    except subprocess.TimeoutExpired:
        raise NotStartedError(f"no answer within {ENGINE_S:.0f} s") from None
    if done.returncode:
        raise NotStartedError(" ".join(done.stderr.split())[-WORDS:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def granted_again(kept_bytes: int, recurring_bytes: int, estimated_bytes: int, folder: Path) -> int:
    """What the second start is granted, after the first stood at `kept_bytes` for as long as counts and reached
    `recurring_bytes` as often as counts."""
    now_s = [0.0]
    history = memory_history.MemoryHistory(folder, "shape", lambda: now_s[0])
    for span in range(memory_history.RECURS):
        now_s[0] = span * memory_history.STOOD_S
        history.measured(recurring_bytes)
        now_s[0] += 1.0
        history.measured(kept_bytes)
    for later_s in (memory_history.STOOD_S, memory_history.SETTLED_S):
        now_s[0] += later_s
        history.measured(kept_bytes)
    estimate = memory_size.MemoryNeed(estimated_bytes)
    return memory_history.MemoryHistory(folder, "shape", time.monotonic).need(estimate).fixed_bytes


def figures(shape: Shape, *, again: bool) -> dict[str, Any]:
    """The figures of one shape. Raises NotStartedError."""
    with tempfile.TemporaryDirectory(prefix="shape-") as name:
        folder = Path(name) / "model"
        write(shape, folder)
        found = measure(shape, folder)
        found["ratio"] = round(found["estimated_bytes"] / found["measured_bytes"], 3)
        if again:
            second = measure(shape, folder)["measured_bytes"]
            granted = granted_again(found["kept_bytes"], found["recurring_bytes"], found["estimated_bytes"], Path(name))
            found |= {"again_bytes": second, "again_ratio": round(granted / second, 3)}
        return found


def table(rows: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    made = Table("shape", "weights, GB", "estimated", "measured", "ratio", "second start", title="beside the KV cache")
    for name, row in rows:
        if "failed" in row:
            made.add_row(name, "", "", "does not start", "", "")
            continue
        sizes = [f"{row[part] / GB:.2f}" for part in ("weights_bytes", "estimated_bytes", "measured_bytes")]
        made.add_row(name, *sizes, f"{row['ratio']:.2f}", f"{row['again_ratio']:.2f}" if "again_ratio" in row else "")
    return made


def met(row: dict[str, Any]) -> bool:
    """Whether a shape is within the bars."""
    ratio = float(row.get("ratio", 0.0))
    again = float(row.get("again_ratio", 1.0))
    return 1.0 <= ratio <= MOST_RATIO and 1 - AGAIN_SHARE <= again <= 1 + AGAIN_SHARE


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_estimate", description=__doc__)
    parser.add_argument("names", nargs="*", help="shapes; none: all")
    parser.add_argument("--quick", action="store_true", help="three shapes, their first start alone")
    chosen = parser.parse_args(arguments)
    wanted = chosen.names or (QUICK if chosen.quick else [shape.name for shape in SHAPES])
    console = Console(stderr=True)
    conditions = here()
    console.print(conditions)
    rows: list[tuple[str, dict[str, Any]]] = []
    for shape in (shape for shape in SHAPES if shape.name in wanted):
        console.print(f"{shape.name}: starting")
        try:
            rows.append((shape.name, figures(shape, again=not chosen.quick)))
        except NotStartedError as error:
            rows.append((shape.name, {"failed": str(error)}))
        console.print(f"{shape.name}: {rows[-1][1]}")
    console.print(table(rows))
    write_json({"conditions": conditions, "shapes": dict(rows), "met": {name: met(row) for name, row in rows}})
