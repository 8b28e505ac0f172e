"""Three endpoints on this machine in one table: `python -m benchmarks.fairness --compare FOLDER [--quick]`.

vLLM's own server, LiteLLM's proxy before that same server, and this stack, with the same model, slots and requests, one
after the other. FOLDER gets LiteLLM's environment: Python's venv with `PACKAGE`, unless it is there.

What tells an endpoint of tenants and classes:

    vllm     nothing of tenants; `priority: 0, 1, 2`, and `--scheduling-policy priority`
    litellm  one key and `user`, since keys of its own need a database; `priority: 0, 1, 2`. It keeps a priority above 0
             for its own scheduler, and the engine does not see it (1.100.1)
    ours     a key for each tenant, which may claim class high; `priority: "high"`

The levels of the classes and the load of `benchmarks.overload` are those of vLLM's own server for all three. The lines
before the JSON object are a table for a document; the object has the results of both benchmarks for each endpoint.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks.common.arms import (
    HOST,
    LITELLM,
    OURS,
    VLLM,
    Arm,
    BenchmarkError,
    ModelChoice,
    await_ready,
    free_port,
    spawn,
    start,
)
from benchmarks.common.output import write_json, write_line
from benchmarks.endpoint.size import size_of
from benchmarks.endpoint.target import Target, add_target_arguments, target_of
from benchmarks.fairness import endpoint as fairness
from benchmarks.fairness.trace import HEAVY, LIGHT
from benchmarks.overload import endpoint as overload
from benchmarks.overload.plan import QUICK_MULTIPLES
from serve_app.engine import ensure_tiny_model

PACKAGE = "litellm[proxy]==1.100.1"  # not 1.82.7, 1.82.8 or 1.107.0: their packages were tampered with
TENANTS = (LIGHT, HEAVY)
SLOTS = 4  # few, so that the overload is hundreds of waiting connections and not thousands
ADMISSION = {"max_queued": 100_000, "max_queued_tokens": None, "max_wait_s": 3600.0}  # as the others: nobody is refused
PRIORITY_SCHEDULING = ("--scheduling-policy", "priority")
NUMBERED = ("--priority", "high=0", "--priority", "normal=1", "--priority", "low=2")
NAMED = ("--priority", "high=high", "--priority", "normal=normal", "--priority", "low=low")
WHOLE_ANSWERS = ("--field", "all:ignore_eos=true")
INSTALL_TIMEOUT_S = 900.0  # a hundred packages
ROWS = (
    ("service, own keys (1:2 asked)", "fairness", "service_ratio"),
    ("service, one key", "fairness", "one_key_service_ratio"),
    ("largest difference, input tokens", "fairness", "max_service_diff"),
    ("difference over rate (60 s)", "fairness", "max_diff_over_rate"),
    ("light tenant's gain, p99", "fairness", "light_ttft_p99_gain"),
    ("`high`: p90 at 4x over 0.5x", "overload", "high_ttft_p90_ratio_4x"),
    ("goodput at 4x over the best", "overload", "goodput_4x_over_peak"),
    ("`low` of the tokens at 4x", "overload", "low_token_share_4x"),
    ("failed", "overload", "failed"),
    ("clients late (p99), ms", "overload", "generator_late_p99_ms"),
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that runs: where, and how it is asked."""

    name: str
    url: str
    arguments: Sequence[str]

    def target(self, model: str) -> Target:
        parser = argparse.ArgumentParser()
        add_target_arguments(parser)
        given = ["--url", self.url, "--model", model, *WHOLE_ANSWERS, *self.arguments]
        return target_of(parser, parser.parse_args(given), tenants=len(TENANTS))


def compare(folder: Path, options: argparse.Namespace, console: Console) -> int:
    """0: there is a table. BenchmarkError: a server did not start, or an endpoint gave no figures."""
    proxy = installed(folder, console)
    model = ModelChoice(path=str(ensure_tiny_model()), max_num_seqs=SLOTS)
    logs = Path(tempfile.mkdtemp(prefix="serve-bench-"))
    results: dict[str, dict[str, Any]] = {}
    try:
        with ExitStack() as stack:
            arm = start(VLLM, model, logs, PRIORITY_SCHEDULING)
            stack.callback(arm.stop)
            keys = [f"--key={tenant}={arm.api_key}" for tenant in TENANTS]
            measure(Endpoint(VLLM, arm.url, [*keys, *NUMBERED]), model, options, results, console)
            gateway = start_proxy(proxy, arm, model, logs)
            stack.callback(gateway.stop)
            keys = [f"--key={tenant}={gateway.api_key}" for tenant in TENANTS]
            users = [f"--field={tenant}:user={tenant}" for tenant in TENANTS]
            measure(Endpoint(LITELLM, gateway.url, [*keys, *users, *NUMBERED]), model, options, results, console)
        with ours(model, logs) as endpoint:
            measure(endpoint, model, options, results, console)
    except BenchmarkError as error:
        raise BenchmarkError(f"{error}\nlogs are in {logs}") from None
    shutil.rmtree(logs)  # only after a success: a failure's logs are worth keeping
    for line in table(results):
        write_line(line)
    write_json({"litellm": PACKAGE, "results": results})
    return 0


@contextmanager
def ours(model: ModelChoice, logs: Path) -> Iterator[Endpoint]:
    """This stack with a key for each tenant. BenchmarkError: it did not start."""
    made = [{"key": secrets.token_hex(16), "tenant": tenant, "max_class": "high"} for tenant in TENANTS]
    arm = start(OURS, model, logs, keys=made, admission=ADMISSION)
    try:
        keys = [f"--key={each['tenant']}={each['key']}" for each in made]
        yield Endpoint(OURS, arm.url, [*keys, *NAMED])
    finally:
        arm.stop()


def measure_ours(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Fairness through the whole stack with vLLM, as any endpoint's. BenchmarkError: there are no figures."""
    model = ModelChoice(path=str(ensure_tiny_model()), max_num_seqs=SLOTS)
    logs = Path(tempfile.mkdtemp(prefix="serve-bench-"))
    try:
        with ours(model, logs) as endpoint:
            found = measure_fairness(endpoint, model, options, console)
    except BenchmarkError as error:
        raise BenchmarkError(f"{error}\nlogs are in {logs}") from None
    shutil.rmtree(logs)
    return found


def measure_fairness(
    endpoint: Endpoint, model: ModelChoice, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """The result object of `benchmarks.fairness` for one endpoint."""
    plan = fairness.EndpointPlan(
        endpoint.target(model.name), size_of(options), options.seed, fairness.seconds_of(options)
    )
    found, _ = fairness.measure(plan, console)
    fairness.show(console, found)
    return found


def measure(
    endpoint: Endpoint,
    model: ModelChoice,
    options: argparse.Namespace,
    results: dict[str, dict[str, Any]],
    console: Console,
) -> None:
    """Both benchmarks of one endpoint, with the load and levels of the first one."""
    console.print(f"{endpoint.name}: {endpoint.url}", markup=False)
    fair = measure_fairness(endpoint, model, options, console)
    target = endpoint.target(model.name)
    seconds = fairness.seconds_of(options)
    plan = overload.EndpointPlan(target, size_of(options), options.seed, QUICK_MULTIPLES, seconds)
    first = next(iter(results.values()), None)
    if first is not None:
        levels = first["overload"]["levels"]
        unloaded = levels["unloaded_ttft_p50_ms"] / 1e3, levels["unloaded_itl_p50_ms"]
        plan = replace(plan, rate=levels["capacity_requests_per_s"], unloaded=unloaded)
    loaded = overload.measure(plan, console)
    overload.show(console, loaded)
    results[endpoint.name] = {"fairness": fair, "overload": loaded}


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown: a column for each endpoint."""
    rows = [("", *results), ("---",) * (len(results) + 1)]
    for title, benchmark, figure in ROWS:
        rows.append((title, *(_cell(result[benchmark].get(figure)) for result in results.values())))
    for title, load in (("`high`: first token p50 at 0.5x, ms", "0.5"), ("the same at 4x", "4")):
        waits = [
            result["overload"]["windows"][overload.ENDPOINT][load]["ttft_ms"]["high"] for result in results.values()
        ]
        rows.append((title, *map(_first_token, waits)))
    return [f"| {' | '.join(row)} |" for row in rows]


def _first_token(wait: Mapping[str, Any]) -> str:
    median = f"{wait['p50']:g} " if wait["n"] else ""
    return f"{median}({wait['n']} of {wait['offered']})"


def _cell(value: float | str | None) -> str:
    return "not measured" if value is None else value.replace("_", " ") if isinstance(value, str) else f"{value:g}"


def installed(folder: Path, console: Console) -> Path:
    """LiteLLM's command in an environment of its own. BenchmarkError: it could not be made."""
    command = folder.resolve() / "bin" / LITELLM
    if not command.exists():
        console.print(f"  {folder}: installing {PACKAGE}", markup=False)
        pip = [str(folder.resolve() / "bin" / "python"), "-m", "pip", "install", "--quiet", PACKAGE]
        for step in ([sys.executable, "-m", "venv", str(folder)], pip):
            done = subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
            if done.returncode:
                raise BenchmarkError(f"{' '.join(step)}: {done.stderr[-500:]}")
    return command


def start_proxy(command: Path, engine: Arm, model: ModelChoice, logs: Path) -> Arm:
    """LiteLLM before a server of vLLM's, ready. BenchmarkError: it did not become so."""
    port = free_port()
    key = f"sk-{secrets.token_hex(16)}"
    config = logs / "litellm.yaml"
    config.touch(mode=0o600)  # it holds the keys
    parameters = {"model": f"hosted_vllm/{model.name}", "api_base": f"{engine.url}/v1", "api_key": engine.api_key}
    settings = {
        "model_list": [{"model_name": model.name, "litellm_params": parameters}],
        "router_settings": {"num_retries": 0},  # a request counts as the engine answered it
        "general_settings": {"master_key": key},
    }
    config.write_text(yaml.safe_dump(settings))
    log = logs / "litellm.log"
    arguments = ["--config", str(config), "--host", HOST, "--port", str(port), "--telemetry", "False"]
    process = spawn([str(command), *arguments], {}, log)
    arm = Arm(LITELLM, LITELLM, port, key, process, log, None, signal.SIGTERM)
    try:
        await_ready(arm)
    except BaseException:
        arm.stop()
        raise
    return arm
