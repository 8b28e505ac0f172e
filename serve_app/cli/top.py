"""`serve-app top`: what runs and what waits now, by model, class and replica, again every two seconds."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from serve_app.cli.command_line import EndpointOptions
from serve_app.cli.endpoint import Endpoint, request, session
from serve_app.cli.layout import say
from serve_app.cli.logs import iso
from serve_app.cli.operators import fetch_soon
from serve_app.errors import ServeAppError, Unavailable

PERIOD_S = 2.0
SCRAPE_S = 10.0  # of all routers
BAR = 10  # columns
WAITING_SHOWN = 1000
CLASSES = ("critical", "high", "normal", "low")
TOKENS_PER_S = "serve_app_engine_tokens_per_second"
EJECTED = "serve_app_ejected"
STATE_STYLES = {"RUNNING": "green", "healthy": "green", "running": "green"}


def top(
    at: EndpointOptions,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Show models, queues with reasons, slots and KV cache, until Ctrl-C."""
    endpoint = at.endpoint()
    found = look(endpoint)
    console = Console()
    if as_json or once or not console.is_terminal:
        while True:
            if as_json:
                console.file.write(json.dumps(found) + "\n")
                console.file.flush()
            else:
                console.print(shown(found))
            if once:
                return
            found = _next(endpoint, found, console)
    with Live(shown(found), console=console, screen=True, auto_refresh=False) as live:
        while True:
            found = _next(endpoint, found, console)
            live.update(shown(found), refresh=True)


def _next(endpoint: Endpoint, before: Mapping[str, Any], console: Console) -> dict[str, Any]:
    """The next look; what does not answer is named in the last one."""
    time.sleep(PERIOD_S)  # bound: until Ctrl-C
    try:
        return look(endpoint)
    except Unavailable as error:
        if not console.is_terminal:
            say(Console(stderr=True), f"error: {error}", "red")
        return {**before, "missing": [str(error)]}


def look(endpoint: Endpoint) -> dict[str, Any]:
    """What the endpoint knows now. Raises ServeAppError: it does not answer, or the key is no operator's."""
    status = fetch_soon(endpoint, "GET", "/admin/status")
    waiting = fetch_soon(endpoint, "GET", "/admin/requests", params={"waiting": 1, "limit": WAITING_SHOWN})
    missing = list(waiting["missing"])
    ledger: Mapping[str, Any] = {"engines": []}
    try:
        ledger = fetch_soon(endpoint, "GET", "/admin/quota")
    except Unavailable:
        missing.append("quota_actor")
    speeds, ejected = _scraped(endpoint)
    engines = {engine["replica"]: engine for engine in ledger["engines"]}
    models = [
        {
            "model": model["name"],
            "state": model["state"],
            "message": model["message"],
            "running": sum(replica["state"] == "RUNNING" for replica in model["replicas"]),
            "wanted": model["target"],
            "ejected": ejected[model["name"]],
            "tokens_per_s": round(sum(speeds[replica["id"]] for replica in model["replicas"]), 1),
            "queues": _queues(one for one in waiting["data"] if one["model"] == model["name"]),
            "replicas": [_replica(one, engines.get(one["id"], {}), speeds[one["id"]]) for one in model["replicas"]],
        }
        for model in status["models"]
    ]
    routers = [{"name": router["id"], "state": router["state"]} for router in status["routers"]]
    now = iso(datetime.now(UTC).timestamp())
    return {
        "time": now,
        "state": status["state"],
        "models": models,
        "routers": routers,
        "missing": sorted(set(missing)),
    }


def shown(found: Mapping[str, Any]) -> Group:
    """What a look has found, in at most 80 columns."""
    running = sum(model["running"] for model in found["models"])
    head = f"{found['time'][11:19]} UTC  {found['state']}, {running} replicas, {len(found['routers'])} routers"
    parts: list[Any] = [Text(head, style="bold")]
    parts += [Text(f"missing: {name}", style="yellow") for name in found["missing"]]
    for model in found["models"]:
        parts += [Text(), _model_line(model), _queue_table(model["queues"]), _replica_table(model["replicas"])]
    return Group(*parts)


def _model_line(model: Mapping[str, Any]) -> Text:
    waiting = sum(queue["waiting"] for queue in model["queues"])
    line = Text(model["model"], style="bold", overflow="fold")
    line.append(f"  {model['state']}", STATE_STYLES.get(model["state"], "yellow"))
    wanted = "" if model["wanted"] is None else f"/{model['wanted']}"
    line.append(f"  {model['running']}{wanted} replicas  {waiting} waiting  {model['tokens_per_s']:.0f} tokens/s", "")
    if model["ejected"]:
        line.append(f"  {model['ejected']} ejected", "red")
    return line


def _queue_table(queues: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 1), pad_edge=True)
    for queue in queues:
        reasons = ", ".join(f"{reason} {count}" for reason, count in queue["reasons"].items())
        table.add_row(queue["class"], f"{queue['waiting']} wait", f"oldest {queue['oldest_s']:.1f} s", reasons)
    return table


def _replica_table(replicas: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 1), pad_edge=True)
    for replica in replicas:
        slots = f"{replica['slots_used']}/{replica['slots_total']}"
        part = replica["kv_used"] / replica["kv_total"] if replica["kv_total"] else 0.0
        table.add_row(
            Text(replica["replica"], overflow="fold"),
            Text(replica["state"], STATE_STYLES.get(replica["state"], "yellow")),
            ProgressBar(max(1, replica["slots_total"]), replica["slots_used"], width=BAR),
            f"{slots} slots",
            ProgressBar(1.0, part, width=BAR),
            f"{100 * part:.0f}% KV",
            f"{replica['tokens_per_s']:.0f} t/s",
        )
    return table


def _queues(waiting: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The waiting requests of a model by class, the highest first."""
    by_class: dict[str, list[Mapping[str, Any]]] = {}
    for record in waiting:
        by_class.setdefault(record["request_class"], []).append(record)
    return [
        {
            "class": name,
            "waiting": len(records),
            "oldest_s": round(max(one["wait_s"] for one in records), 2),
            "reasons": dict(Counter(one["waits_for"] or "unknown" for one in records).most_common()),
        }
        for name in CLASSES
        if (records := by_class.get(name))
    ]


def _replica(replica: Mapping[str, Any], engine: Mapping[str, Any], speed: float) -> dict[str, Any]:
    return {
        "replica": replica["id"],
        "state": replica["state"],
        "address": replica["address"],
        "slots_used": engine.get("slots_used") or 0,
        "slots_total": engine.get("slots") or 0,
        "kv_used": engine.get("kv_tokens_used") or 0,
        "kv_total": engine.get("kv_tokens") or 0,
        "tokens_per_s": round(speed, 1),
    }


def _scraped(endpoint: Endpoint) -> tuple[dict[str, float], dict[str, int]]:
    """Tokens a second by replica, and ejected replicas by model, the largest number that a router has."""
    speeds: defaultdict[str, float] = defaultdict(float)
    ejected: defaultdict[str, int] = defaultdict(int)
    try:
        with session(endpoint) as http:
            text = request(http, endpoint, "GET", "/metrics", timeout=(SCRAPE_S, SCRAPE_S)).text
    except ServeAppError as error:
        if not isinstance(error, Unavailable):
            raise
        return speeds, ejected
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == TOKENS_PER_S:
                speeds[sample.labels["replica"]] += sample.value
            elif sample.name == EJECTED:
                name = sample.labels["model"]
                ejected[name] = max(ejected[name], round(sample.value))
    return speeds, ejected
