"""The arms that are up, and how one window of one of them is measured.

Invariant: one arm at most is under load; a window with a failed request gives no figure but an error.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from benchmarks.common.arms import (
    HOST,
    ROOT,
    START_TIMEOUT_S,
    Arm,
    BenchmarkError,
    ModelChoice,
    greedy_answer,
    start,
)
from benchmarks.common.child import ends_with_us
from benchmarks.common.plan import MAX_TOKENS, Plan
from benchmarks.common.processes import CpuMeter, machine_busy_s
from benchmarks.common.report import Window
from benchmarks.common.workload import Spec, write_spec

ARM_WARMUP_S = 4.0  # under full load after each start: first batches of each size allocate and compile
ARM_WARMUP_WINDOW_S = 0.5  # the generator wants one; its figures are not used
ARM_WARMUP_SEED = 0  # of prompts that no measured window repeats
IDLE_SETTLE_S = 2.0
IDLE_WINDOW_S = 5.0  # CPU clocks tick at 10 ms: 5 s resolve 0.2% of a core
CHECK_TOKENS = 48  # of the answer that shows both arms serve the same model
CHECK_PROMPT = "Say what a benchmark is, in your own words."
LOADGEN_EXIT_TIMEOUT_S = 30.0  # after its result is written only its exit is left


def on_terminate(signum: int, _frame: FrameType | None) -> None:
    """Turn a signal into an exception, so that the servers are taken down on the way out."""
    raise SystemExit(128 + signum)


@contextmanager
def run_folder(console: Console) -> Iterator[Path]:
    """A folder for the logs of a run, which SIGTERM ends as an exception does. Only a success removes it: a failure's
    logs are worth keeping.

    Raises:
        SystemExit: 1 after a BenchmarkError, which has been shown.
    """
    signal.signal(signal.SIGTERM, on_terminate)
    folder = Path(tempfile.mkdtemp(prefix="serve-bench-"))
    try:
        yield folder
    except BenchmarkError as error:
        console.print(f"failed: {error}\nlogs are in {folder}", style="red", markup=False)
        raise SystemExit(1) from None
    shutil.rmtree(folder)


@dataclass(slots=True)
class Stage:
    """The arms that are up. In `one_at_a_time` mode asking for one takes the others down.

    Args:
        admission: this stack's line, as in its configuration file.
        environments: by label, over what both arms get.
    """

    model: ModelChoice
    folder: Path
    vllm_arguments: Sequence[str]
    console: Console
    one_at_a_time: bool
    admission: Mapping[str, Any] = field(default_factory=dict)
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    start_timeout_s: float = START_TIMEOUT_S
    up: dict[str, Arm] = field(default_factory=dict)
    idle_cores: dict[str, dict[str, float]] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)

    def get(self, label: str) -> Arm:
        """The arm, started and warmed up if need be.

        Raises:
            BenchmarkError: it does not start, or fails under its warm-up.
        """
        if self.one_at_a_time:
            for other in [name for name in self.up if name != label]:
                self.up.pop(other).stop()
        if label not in self.up:
            self.up[label] = arm = start(
                label,
                self.model,
                self.folder,
                self.vllm_arguments,
                admission=self.admission,
                environment=self.environments.get(label),
                timeout_s=self.start_timeout_s,
            )
            self.console.print(f"  {label}: up after {arm.start_s:.0f} s on port {arm.port}")
            warm_up = {"warmup_s": ARM_WARMUP_S, "window_s": ARM_WARMUP_WINDOW_S, "max_requests": sys.maxsize}
            drive(arm, spec_of(arm, self.model, clients=self.model.max_num_seqs, seed=ARM_WARMUP_SEED, **warm_up))
            if label not in self.idle_cores:
                self._look_at(arm)
        return self.up[label]

    def _look_at(self, arm: Arm) -> None:
        """What it answers, where its engine runs, and what it costs when idle."""
        self.answers[arm.label] = greedy_answer(arm, self.model, CHECK_PROMPT, CHECK_TOKENS)
        self.engines[arm.label] = arm.engine_placement()
        time.sleep(IDLE_SETTLE_S)
        meter = CpuMeter(arm.process.pid, arm.instance)
        meter.begin()
        time.sleep(IDLE_WINDOW_S)
        used = {role: round(seconds / IDLE_WINDOW_S, 4) for role, seconds in meter.end().items()}
        self.idle_cores[arm.label] = used
        by_role = ", ".join(f"{role} {cores:g}" for role, cores in sorted(used.items()) if cores)
        self.console.print(f"  {arm.label}: idle it uses {sum(used.values()):.3f} cores ({by_role or 'nothing'})")

    def close(self) -> None:
        """Take every arm down, also when one of them resists."""
        with ExitStack() as stack:
            while self.up:
                stack.callback(self.up.popitem()[1].stop)


def spec_of(arm: Arm, model: ModelChoice, **more: Any) -> Spec:
    """What the load generator is to do to an arm; `more`: the fields of `Spec` that say how much."""
    return Spec(host=HOST, port=arm.port, api_key=arm.api_key, model=model.name, max_tokens=MAX_TOKENS, **more)


def drive(
    arm: Arm, spec: Any, module: str = "benchmarks.common.loadgen"
) -> tuple[dict[str, Any], dict[str, float], float]:
    """One run of the load generator: its result, the arm's CPU seconds by role in the window, and those of processes
    that take no part.

    Args:
        spec: the dataclass that `module` wants.

    Raises:
        BenchmarkError: any request failed, or the generator did.
    """
    meter = CpuMeter(arm.process.pid, arm.instance)
    generator = subprocess.Popen(
        [*ends_with_us(signal.SIGTERM), sys.executable, "-m", module],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line, cpu_s, busy_s = _follow(generator, spec, meter)
        code = generator.wait(LOADGEN_EXIT_TIMEOUT_S)
    finally:
        generator.kill()
        generator.wait()
    try:
        result: dict[str, Any] = json.loads(line)
    except ValueError:
        raise BenchmarkError(f"the load generator ended with {code} and without a result") from None
    if code or result["errors"]:
        samples = "\n".join(result["error_samples"])
        message = f"{arm.label}, {spec.clients} clients: {result['errors']} errors, the first of them:\n{samples}"
        raise BenchmarkError(f"{message}\nend of its log:\n{arm.log_tail()}")
    return result, cpu_s, max(0.0, busy_s - sum(cpu_s.values()) - result["cpu_s"])


def _follow(generator: subprocess.Popen[str], spec: Any, meter: CpuMeter) -> tuple[str, dict[str, float], float]:
    """Hand the spec over and read the clocks at the edges of the window. Returns the last line, the arm's CPU seconds
    by role, and the machine's without our own."""
    if generator.stdin is None or generator.stdout is None:
        raise BenchmarkError("the load generator has no pipes")
    generator.stdin.write(write_spec(spec))
    generator.stdin.close()
    line = ""
    cpu_s = {}
    at_begin = 0.0
    busy_s = 0.0
    for line in generator.stdout:
        if line == "begin\n":
            meter.begin()
            at_begin = machine_busy_s() - time.process_time()
        elif line == "end\n":
            busy_s = machine_busy_s() - time.process_time() - at_begin
            cpu_s = meter.end()
    return line, cpu_s, busy_s


def measure(arm: Arm, model: ModelChoice, plan: Plan, clients: int, round_number: int, seed: int) -> Window:
    """One window of one arm under `clients` clients.

    Raises:
        BenchmarkError: any request failed.
    """
    sizes = {"warmup_s": plan.warmup_s, "window_s": plan.window_s, "max_requests": plan.max_requests}
    result, cpu_s, foreign_s = drive(arm, spec_of(arm, model, clients=clients, seed=seed, **sizes))
    return Window(arm.label, clients, round_number, result, cpu_s, foreign_s / result["window_s"])
