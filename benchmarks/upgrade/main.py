"""A rolling upgrade under load: `python -m benchmarks.upgrade [--quick] [--engine vllm|simulated] [--clients N]`.

The stack runs from a copy of the code in a folder of its own, as an installation on a node would. Clients ask without
pause, every second one for a stream, over a connection per request. Meanwhile, one after the other, each waited for:

- model: other weights (a folder of its own) under the same name;
- settings: a setting that an engine is started with;
- code: the copy becomes the next release and is deployed with the same configuration, so routers, engines and the quota
  actor are replaced;
- a bad model: weights that are not there; the deployment fails and is rolled back by itself.

Prints conditions, a table, and as its last line one JSON object. `longest_gap_s`: the longest time in which no client
got a token or an answer. Exit code 1 if a request failed, or if what was to be replaced was not.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import serve_app
from benchmarks.common import conditions
from benchmarks.common.output import write_json
from benchmarks.common.processes import title_of
from benchmarks.common.scaling_stack import DEPLOY_S, MODEL, Clients, Stage, stack
from serve_app.engine import ensure_tiny_model
from serve_app.names import DISTRIBUTION, RELEASE

CLIENTS = 16
QUICK_CLIENTS = 4
TOKENS = 32
# of load before, between and after the changes
BEFORE_S = 10.0
QUICK_BEFORE_S = 2.0
NEXT_RELEASE = f"{RELEASE}.post1"
REPLICAS = {"max_surge_percent": 100}


def longest_gap_s(at: Sequence[float], since: float, until: float) -> float:
    """The longest time without a token in this span. `at`: the moments at which tokens came."""
    moments = [since, *(one for one in sorted(at) if since < one < until), until]
    return max(later - earlier for earlier, later in itertools.pairwise(moments))


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A change: its name, the time it took, the longest gap from its begin to the next one's, and how it ended."""

    name: str
    took_s: float
    gap_s: float
    requests: int
    failed: int
    replaced: tuple[str, ...]
    state: str


class Upgrade:
    """The running stack, its copy of the code, and the changes."""

    def __init__(self, stage: Stage, site: Path, config: dict[str, Any], clients: Clients) -> None:
        self._stage = stage
        self._site = site
        self._config = config
        self.clients = clients

    def deploy(self, **changes: Any) -> dict[str, Any]:
        """The configuration with these changes of its model, as `serve-app deploy` of the site's release does it; the
        last state. A change that runs is the configuration from then on."""
        model = self._config["models"][0] | changes
        entry = self._stage.entry(self._config | {"models": [model]})
        entry["args"]["release"] = installed(self._site)
        last = self._stage.declare(entry)
        if last.get("state") == "running":
            self._config["models"][0] = model
        return last

    def next_release(self) -> None:
        """Install the next release over the present one, as `pip install` does."""
        (metadata,) = self._site.glob("*.dist-info")
        text = (metadata / "METADATA").read_text()
        (metadata / "METADATA").write_text(text.replace(f"\nVersion: {RELEASE}\n", f"\nVersion: {NEXT_RELEASE}\n"))
        metadata.rename(metadata.with_name(f"{DISTRIBUTION.replace('-', '_')}-{NEXT_RELEASE}.dist-info"))

    def processes(self) -> dict[str, int]:
        """Of the routers, engines and the quota actor, by title."""
        found: dict[str, int] = {}
        for pid in self._stage.cluster.pids():
            title = title_of(pid)
            if title.startswith(("ray::ServeReplica", "ray::GpuMemoryQuota")):
                found[title.partition(".")[0]] = pid
        return found


def make_site(folder: Path) -> Path:
    """A copy of the installed application with its metadata, in a folder for PYTHONPATH."""
    root = Path(serve_app.__file__).parents[1]
    site = folder / "site"
    for package in ("serve_app", "autoscaling"):
        shutil.copytree(root / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = next(path for entry in sys.path for path in Path(entry).glob(f"serve_app-{RELEASE}.dist-info"))
    shutil.copytree(metadata, site / metadata.name)
    return site


def installed(site: Path) -> str:
    """The release of a site."""
    (metadata,) = site.glob("*.dist-info")
    return metadata.name.removesuffix(".dist-info").rpartition("-")[2]


def configuration(engine: str, weights: str) -> dict[str, Any]:
    model: dict[str, Any] = {"name": MODEL, "engine": engine, "max_num_seqs": 8, "replicas": REPLICAS}
    if engine == "vllm":
        model |= {"path": weights, "dtype": "float32", "max_model_len": 2048, "kv_cache_gb": 0.25}
    else:
        model |= {"simulated": {"decode_step_s": 0.01, "start_s": 2.0}}
    return {"models": [model], "admission": {"max_wait_s": DEPLOY_S, "no_replica_wait_s": DEPLOY_S}}


def changes_of(engine: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What makes it another model, and what makes it one that cannot start."""
    if engine == "simulated":
        return {"generation": 1}, {"max_model_len": 8192, "simulated": {"kv_cache_tokens": 4096}}
    return {"path": str(ensure_tiny_model(folder / "other", seed=1))}, {"path": str(folder / "absent")}


def run(upgrade: Upgrade, steps: Sequence[tuple[str, Callable[[], dict[str, Any]]]], rest_s: float) -> list[Step]:
    """Each change with load before and after it."""
    done = []
    for name, change in steps:
        clients = upgrade.clients
        before = upgrade.processes()
        answered = clients.answered
        failed = len(clients.failures)
        began = time.monotonic()
        state = change()
        took_s = time.monotonic() - began
        time.sleep(rest_s)  # bound: rest_s; the load goes on
        after = upgrade.processes()
        replaced = tuple(sorted(title for title in before if after.get(title) != before[title]))
        failures = len(clients.failures) - failed
        gap_s = longest_gap_s(clients.at, began, time.monotonic())
        count = clients.answered - answered + failures
        done.append(Step(name, took_s, gap_s, count, failures, replaced, str(state.get("state"))))
    return done


def main(arguments: Sequence[str]) -> int:
    """Runs it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upgrade", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer clients, shorter spans between the changes")
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--clients", type=int, default=None)
    options = parser.parse_args(arguments)
    console = Console(stderr=False)
    count = options.clients or (QUICK_CLIENTS if options.quick else CLIENTS)
    rest_s = QUICK_BEFORE_S if options.quick else BEFORE_S
    found = conditions.here(engine=options.engine, clients=count, tokens=TOKENS)
    console.print(found)
    with tempfile.TemporaryDirectory(prefix="upgrade-") as name:
        folder = Path(name)
        site = make_site(folder)
        other, bad = changes_of(options.engine, folder)
        config = configuration(options.engine, "tiny")
        with stack(config, environment={"PYTHONPATH": str(site)}) as stage:
            clients = Clients(stage, count, TOKENS, has_streams=True)
            clients.start()
            upgrade = Upgrade(stage, site, config, clients)
            time.sleep(rest_s)  # bound: rest_s; the load before the first change

            def code() -> dict[str, Any]:
                upgrade.next_release()
                return upgrade.deploy()

            steps = (
                ("model", lambda: upgrade.deploy(**other)),
                ("settings", lambda: upgrade.deploy(max_num_seqs=12)),
                ("code", code),
                ("bad model", lambda: upgrade.deploy(**bad)),
            )
            done = run(upgrade, steps, rest_s)
            clients.finish()
            left = upgrade.processes()
    return _report(console, done, clients, left, found)


def _report(
    console: Console, done: Sequence[Step], clients: Clients, left: dict[str, int], found: dict[str, Any]
) -> int:
    table = Table("change", "took s", "longest gap s", "requests", "failed", "replaced", "ended", title="upgrade")
    for step in done:
        replaced = ", ".join(title.rpartition(":")[2] for title in step.replaced) or "nothing"
        figures = f"{step.took_s:.1f}", f"{step.gap_s:.2f}", str(step.requests), str(step.failed)
        table.add_row(step.name, *figures, replaced, step.state)
    console.print(table)
    for failure in clients.failures[:5]:
        console.print("failed:", failure, markup=False)
    wanted = {"model": 1, "settings": 1, "code": len(left), "bad model": 0}
    whole = all(len(step.replaced) >= wanted[step.name] for step in done)
    states = [step.state for step in done] == ["running", "running", "running", "failed"]
    result = {
        "requests": clients.answered + len(clients.failures),
        "failed": len(clients.failures),
        "longest_gap_s": round(max(step.gap_s for step in done), 2),
        "changes": {step.name: dataclasses.asdict(step) for step in done},
        "replaced_as_expected": whole and states,
        "conditions": found,
    }
    write_json(result)
    return 0 if not clients.failures and whole and states else 1
