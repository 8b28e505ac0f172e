"""`serve-app check`, and the check before `serve-app up` and `serve-app deploy` (`--plan`): what is wrong with a
configuration, and what a deploy would change.

Invariant: nothing is started, deployed or downloaded, and a cluster is only asked.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pynvml
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from serve_app.cli import deploy as deploying
from serve_app.cli.check import (
    AssumedNode,
    Cluster,
    Finding,
    Node,
    Reading,
    assumed_cluster,
    check_access,
    check_certificate,
    check_fit,
    check_jwks,
    check_model,
    check_settings,
    check_templates,
    read,
)
from serve_app.cli.progress import Progress
from serve_app.cluster.local import InstanceState, ask
from serve_app.engine.start import environment, memory_history, memory_size, model_lookup, vllm_arguments
from serve_app.errors import Unavailable
from serve_app.settings import GB, Change, ModelSettings, QuotaSettings, Settings, application, changes, masked
from serve_app.system import gpus

LOOK_UPS = 8  # models at once: each is a few requests to the hub
STYLES = {"error": "red", "warning": "yellow"}
MARKS = {"added": "+", "removed": "-", "restarted": "!", "changed": "~", "later": "~", "unchanged": "="}


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found. `needs`: what a rank of each model needs beside its KV pool, by the model's name."""

    findings: list[Finding]
    needs: dict[str, memory_size.MemoryNeed] = field(default_factory=dict)


def check(
    settings: Settings,
    cluster: Cluster,
    progress: Progress,
    *,
    here: bool,
    platform: environment.Platform | None = None,
) -> Checked:
    """Everything wrong with settings that parse, and the memory that their engines will ask for.

    Args:
        cluster: where they are to run.
        here: on this machine, whose folders and cache they will use.
        platform: of vLLM's build there; None: as here.
    """
    platform = platform or environment.platform()
    found = check_settings(settings, platform, vllm_arguments.installed_arguments())
    found += check_access(settings, datetime.now(UTC))
    if here:
        found += check_templates(settings) + check_jwks(settings)
    progress.begin("Checking the models")
    with ThreadPoolExecutor(LOOK_UPS) as pool:
        facts = list(pool.map(model_lookup.look_up, settings.models))
    for index, (model, known) in enumerate(zip(settings.models, facts, strict=True)):
        found += check_model(f"models.{index}", model, known, here=here)
    needs = [_need(model, known, platform, here=here) for model, known in zip(settings.models, facts, strict=True)]
    of_vllm = {model.name: need for model, need in zip(settings.models, needs, strict=True) if model.engine == "vllm"}
    found += check_fit(settings, facts, needs, cluster, platform)
    return Checked([_with_names(one, settings) for one in found], of_vllm)


def _with_names(found: Finding, settings: Settings) -> Finding:
    """A finding with `${NAME}` in place of what it stands for."""
    if not settings.names:
        return found
    place = tuple(int(part) if part.isdigit() else part for part in found.path.split("."))
    data = settings.model_dump(mode="json")
    message, remedy = (masked(text, data, settings.names, place) for text in (found.message, found.remedy))
    return dataclasses.replace(found, message=message, remedy=remedy)


def _need(
    model: ModelSettings, known: model_lookup.ModelFacts, platform: environment.Platform, *, here: bool
) -> memory_size.MemoryNeed:
    """What was measured counts where it was: on this machine."""
    need_of = memory_history.need_here if here else memory_size.estimated_need
    return need_of(model, platform, known.weights_bytes or 0, known.config)


def this_machine(quota: QuotaSettings, num_cpus: int | None = None) -> Cluster:
    """This machine as a cluster of one node, as `serve-app up` would start it."""
    cpus = num_cpus or os.cpu_count() or 1  # as Ray counts
    try:
        sizes = [size for _, size in gpus()]
    except pynvml.NVMLError:
        sizes = []
    return Cluster((_node({"CPU": float(cpus), "GPU": float(len(sizes))}, sizes, quota),))


def running_cluster(found: dict[str, Any], *, grows: bool) -> Cluster:
    """The nodes of a driver's answer to the order `deployed`. Their devices are as the quota actor has them: the
    actor's settings were read when it started."""
    return Cluster(
        tuple(
            Node(
                node["resources"].get("CPU", 0.0),
                node["resources"].get("GPU", 0.0),
                tuple(node["device_bytes"]),
                _kinds(node["resources"]),
            )
            for node in found["nodes"]
        ),
        grows,
    )


def _node(resources: dict[str, float], gpu_bytes: Sequence[int], quota: QuotaSettings) -> Node:
    if not gpu_bytes:
        sizes: tuple[int, ...] = (math.floor(psutil.virtual_memory().total * quota.host_memory_share),)
    else:
        whole = gpu_bytes if quota.device_gb is None else [round(quota.device_gb * GB)] * len(gpu_bytes)
        sizes = tuple(one - round(quota.reserved_gb * GB) for one in whole)
    return Node(resources["CPU"], resources["GPU"], sizes, _kinds(resources))


def _kinds(resources: dict[str, float]) -> tuple[str, ...]:
    kind = "accelerator_type:"
    return tuple(name.removeprefix(kind) for name in resources if name.startswith(kind))


def plan(found: dict[str, Any], wanted: Settings) -> list[Change]:
    """What a deploy of these settings would change on a cluster that answered this. Without keys of its own the running
    ones count as its own: a deploy keeps a generated key."""
    deployed = found["arguments"]
    wanted = wanted.without_secrets()
    if isinstance(deployed, dict) and not wanted.auth.keys:
        deployed = deployed | {"auth": wanted.auth.model_dump(mode="json")}
    return changes(deployed, application(wanted)["args"], on_cpu=environment.platform() == "cpu")


# Where a configuration is to run: what runs there, nodes that are not here, or this machine, where nothing runs.
Place = deploying.Target | tuple[AssumedNode, ...] | None


def place(address: str | None, state: InstanceState) -> deploying.Target | None:
    """The cluster at `address`, the instance that runs, or this machine."""
    try:
        return deploying.find(address, state)
    except Unavailable:
        return None


def _is_here(where: Place) -> bool:
    """Whether it is to run on this machine."""
    return where.state is not None if isinstance(where, deploying.Target) else where is None


def tell(config: Path, where: Place, *, as_json: bool, with_plan: bool) -> bool:
    """Print everything found in a file, and the plan of its deploy. Returns whether there is an error.

    Raises:
        Unavailable: the cluster cannot be reached.
    """
    found = read(config)
    planned: list[Change] | None = None
    replicas: dict[str, list[str]] = {}
    needs: dict[str, memory_size.MemoryNeed] = {}
    with Progress(Console(stderr=True)) as progress:
        if found.settings is None:
            findings = [*found.findings, *_check_right_models(found, progress, here=_is_here(where))]
        else:
            checked, planned, replicas = _look(found.settings, where, progress)
            findings = [*found.findings, *checked.findings]
            needs = checked.needs
    planned = planned if with_plan else None
    if as_json:
        print(json.dumps(_as_json(findings, needs, planned, replicas)))
    else:
        console = Console()
        show(findings, str(config), console)
        for name, need in () if with_plan or has_errors(findings) else needs.items():
            _say(console, Text(f"{name}: a rank needs {need} beside its KV cache"), 2)
        if planned is not None:
            show_plan(planned, replicas, console)
    return has_errors(findings)


def _look(
    settings: Settings, where: Place, progress: Progress
) -> tuple[Checked, list[Change] | None, dict[str, list[str]]]:
    """What was found, the plan (None: nothing runs there), and the ids of the replicas by deployment."""
    if isinstance(where, tuple):
        nodes = assumed_cluster(where, settings.quota)
        return check(settings, nodes, progress, here=False, platform="gpu"), None, {}
    if where is None:
        checked = check(settings, this_machine(settings.quota), progress, here=True)
        checked.findings.extend(check_certificate(settings))  # read by an instance that starts, and by no deploy
        return checked, None, {}
    progress.begin("Asking the cluster")
    found = ask({"do": "deployed", "environment": where.environment})
    here = _is_here(where)
    checked = check(settings, running_cluster(found, grows=not here), progress, here=here)
    return checked, plan(found, settings), found["replicas"]


def _check_right_models(found: Reading, progress: Progress, *, here: bool) -> list[Finding]:
    """What a check finds in those models of a file with errors that have none, each by itself: no cluster is asked."""
    if not found.right:
        return []
    positions = list(found.right)
    names = found.names.get("models", {})
    of_models = {str(index): names[str(at)] for index, at in enumerate(positions) if str(at) in names}
    alone = Settings(models=list(found.right.values())).with_names({"models": of_models} if of_models else {})
    renumbered = []
    for finding in check(alone, Cluster((), grows=True), progress, here=here).findings:
        head, number, *rest = finding.path.split(".")
        renumbered.append(dataclasses.replace(finding, path=".".join([head, str(positions[int(number)]), *rest])))
    return renumbered


def readable(config: Path, console: Console, *, here: bool) -> bool:
    """Whether a file has settings; if not, all mistakes are shown. `here`: see `check`."""
    found = read(config)
    if found.settings is None:
        with Progress(console) as progress:
            more = _check_right_models(found, progress, here=here)
        show([*found.findings, *more], str(config), console)
    return found.settings is not None


def passes(settings: Settings, cluster: Cluster, console: Console) -> bool:
    """Whether settings can be started on this machine; what is found is shown."""
    with Progress(console) as progress:
        findings = check(settings, cluster, progress, here=True).findings
    if findings:
        show(findings, "configuration", console)
    return not has_errors(findings)


def may_deploy(settings: Settings, where: Place, console: Console, errors: Console) -> bool:
    """Whether settings can be deployed there; what is found is shown, and what the deploy will do to what runs.

    Raises:
        Unavailable: the cluster cannot be reached.
    """
    with Progress(console) as progress:
        checked, planned, replicas = _look(settings, where, progress)
    findings = checked.findings
    if findings:
        show(findings, "configuration", errors)
    if has_errors(findings):
        return False
    show_plan([one for one in planned or () if one.effect != "unchanged"], replicas, console)
    return True


def show(findings: Sequence[Finding], subject: str, console: Console) -> None:
    """The findings about `subject` with their remedies, errors first; says so where there are none."""
    for finding in sorted(findings, key=lambda finding: (finding.severity != "error", finding.path)):
        head = Text.assemble((finding.severity, STYLES[finding.severity]), f": {finding.path}: {finding.message}")
        _say(console, head)
        _say(console, Text(f"-> {finding.remedy}"), 2)
    counts = {kind: sum(one.severity == kind for one in findings) for kind in STYLES}
    texts = [f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in counts.items() if count]
    _say(console, Text(f"{subject}: {', '.join(texts) or 'nothing is wrong with it'}"))


def show_plan(planned: Sequence[Change], replicas: dict[str, list[str]], console: Console) -> None:
    """What becomes of each deployment, its replicas, and why."""
    for change in planned:
        running = replicas.get(change.deployment, [])
        count = f" ({len(running)} replica{'' if len(running) == 1 else 's'})" if running else ""
        _say(console, Text(f"{MARKS[change.effect]} {change.deployment}{count}: {change.effect}: {change.why}"))
        for changed in change.fields:
            _say(console, Text(changed), 4)


def _as_json(
    findings: Sequence[Finding],
    needs: dict[str, memory_size.MemoryNeed],
    planned: Sequence[Change] | None,
    replicas: dict[str, list[str]],
) -> dict[str, Any]:
    """`findings`, `memory` by the model's name, and with a plan `plan` with the replicas of each deployment."""
    document: dict[str, Any] = {
        "findings": [dataclasses.asdict(one) for one in findings],
        "memory": {name: dataclasses.asdict(need) for name, need in needs.items()},
    }
    if planned is not None:
        document["plan"] = [change_as_json(change, replicas.get(change.deployment, [])) for change in planned]
    return document


def change_as_json(change: Change, replicas: list[str]) -> dict[str, Any]:
    """`what` is the change's effect: the name is published."""
    shown = {"deployment": change.deployment, "what": change.effect, "why": change.why, "fields": change.fields}
    return shown | {"replicas": replicas}


def _say(console: Console, text: Text, indent: int = 0) -> None:
    """One line; wrapped under itself on a terminal, and whole elsewhere, where it is read by programs."""
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, indent), expand=False), highlight=False)
    else:
        console.print(Text(" " * indent).append_text(text), highlight=False, soft_wrap=True)


def has_errors(findings: Sequence[Finding]) -> bool:
    return any(one.severity == "error" for one in findings)
