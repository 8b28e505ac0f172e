"""One command for a machine with GPUs: `python -m benchmarks.gpu_check [--quick] [--model ID] [--device cpu]`.

With one rank, and with two where there are two GPUs: answers equal to those of vLLM's own server, the ledger beside
NVML, the size of the KV cache, CUDA graphs, streams continued at the borders of KV blocks and after their engine was
killed, throughput beside vLLM's own server. `--device cpu` runs the same flow where there is no GPU.

Writes a report (Markdown), prints its table, and as its last line one JSON object. Exit status: 0 all checks passed or
do not apply, 1 one failed, 2 there is no GPU.

Invariant: whatever was started is ended at the end, also after Ctrl-C; the report has the checks made until then.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import conditions
from benchmarks.common.arms import our_settings
from benchmarks.common.output import write_json
from benchmarks.common.run import CONSOLE_WIDTH
from benchmarks.common.stage import run_folder
from benchmarks.gpu_check import checks, machine, plan, report
from benchmarks.gpu_check.checks import Result
from benchmarks.gpu_check.part import UNUSED_KEY, PartChecks
from serve_app.cli.check import text_config
from serve_app.engine import ensure_tiny_model
from serve_app.engine.start import environment, model_lookup
from serve_app.settings import parse

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


def run(options: plan.Options, found: list[machine.Gpu], results: list[Result], folder: Path, console: Console) -> None:
    """All checks; `results` gets each as soon as it is there."""

    def record(result: Result) -> None:
        results.append(result)
        summary = f"  {result.outcome.value}: {' '.join(filter(None, (result.part, result.check)))}: {result.seen}"
        console.print(summary, style=report.STYLES[result.outcome], markup=False)

    console.print("the machine and the model are looked at")
    record(checks.environment(machine.doctor_checks(), machine.figures(found)))
    path = options.model or str(ensure_tiny_model())
    settings = parse(our_settings(options.choice(path, 1), UNUSED_KEY)).models[0]
    known = model_lookup.look_up(settings)
    if known.problem is not None:
        record(checks.failure("model", "", f"{path}: {known.problem} {known.detail}".strip()))
        return
    heads = text_config(settings, known.config).get("num_attention_heads")
    for part in plan.parts(options.device, len(found), len(os.sched_getaffinity(0)), heads):
        if part.obstacle:
            for check in checks.OF_EACH_PART:
                record(checks.not_applicable(check, part.name, part.obstacle))
        else:
            PartChecks(options, part, path, known, folder, console, record).run()


def main(arguments: Sequence[str]) -> int:
    """Runs it; returns the exit status."""
    options = plan.parse_arguments(arguments, str(__doc__))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else CONSOLE_WIDTH)
    found, error = machine.gpus()
    if missing := plan.obstacle(options.device, environment.platform(), len(found), error):
        console.print(f"{missing}\n`--device cpu` runs the same checks without a GPU", style="red", markup=False)
        write_json({"verdict": "no device", "missing": missing})
        return checks.NO_GPU
    facts = conditions.here(device=options.device, model=options.model or "tiny", dtype=options.dtype)
    results: list[Result] = []
    status: int | None = None
    with run_folder(console) as folder:
        try:
            run(options, found, results, folder, console)
        except KeyboardInterrupt:
            console.print("interrupted; everything that was started has been ended")
            results.append(checks.failure("run", "", "interrupted"))
            status = INTERRUPTED
        status = checks.exit_status(results) if status is None else status
        if status != checks.PASSED:
            _keep_logs(folder, options.out.with_name(f"{options.out.stem}-logs"), console)
    _write(options, arguments, results, facts, console)
    return status


def _keep_logs(folder: Path, target: Path, console: Console) -> None:
    """The servers' logs, without their configurations, which hold keys."""
    for log in folder.rglob("*.log"):
        copy = target / log.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, copy)
    console.print(f"logs: {target}", markup=False)


def _write(
    options: plan.Options, arguments: Sequence[str], results: list[Result], facts: dict[str, Any], console: Console
) -> None:
    command = shlex.join(["python", "-m", "benchmarks.gpu_check", *arguments])
    options.out.write_text(report.markdown(results, command, facts))
    console.print(report.table(results))
    console.print(f"{report.verdict(results)}; report: {options.out}", markup=False)
    write_json(report.as_json(results, facts, str(options.out)))
