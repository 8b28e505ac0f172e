"""`serve-app quota`: prints the ledger of GPU memory as tables or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from serve_app.cluster.local import ask
from serve_app.errors import Unavailable
from serve_app.settings import GB

SIZES = ("total", "reserved", "granted", "free")


def ask_actor(what: str, environment: Mapping[str, str], **options: Any) -> dict[str, Any]:
    """The quota actor's answer: its figures ("quota"), or with "defrag" the `plan` that frees memory for the first
    waiting engine; the plan is None if no engine waits, or no plan helps.

    Args:
        environment: of a driver of the cluster.

    Raises:
        Unavailable: no cluster answers there, or it has no quota actor.
    """
    answer = ask({"do": what, "environment": dict(environment), **options})
    if not answer:
        raise Unavailable("the cluster did not answer", code="not_running")
    return answer


def show_plan(found: Mapping[str, Any], console: Console) -> None:
    """Print the `plan`, and whether it is `begun`."""
    plan = found["plan"]
    if plan is None:
        console.print("Nothing to do: no engine waits for memory, or no restart would free enough.")
        return
    waits = plan["waits"]
    wanted = f"{waits['ranks']} x {_gb(waits['least_bytes'])}"
    console.print(f"{waits['owner']} of {waits['model']} waits for {wanted}", markup=False, highlight=False)
    table = Table("step", "replica", "model", "drains on", "expected on", "to load")
    for number, step in enumerate(plan["steps"], start=1):
        places = (", ".join(map(_short, step[name])) for name in ("source", "target"))
        table.add_row(str(number), step["owner"], step["model"], *places, _gb(step["bytes_to_move"]))
    console.print(table)
    console.print("Begun: one replica at a time." if found["begun"] else "Only planned; `serve-app defrag` does it.")


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print the figures as tables."""
    say = partial(console.print, markup=False, highlight=False)
    sizes = "  ".join(f"{name} {_gb(found[f'{name}_bytes'])}" for name in SIZES)
    rebuilt = "  (the ledger is being rebuilt)" if found["recovering"] else ""
    say(f"{sizes}  fragmentation {found['fragmentation']:.2f}{rebuilt}")
    if found["fragmented"]:
        share = f"{found['fragmentation']:.0%} of what is free lies where the models here do not fit"
        say(f"{share}; `serve-app defrag` frees memory for one that waits", style="yellow")
    devices = Table("device", *SIZES, "%")
    for one in found["devices"]:
        amounts = (_gb(one[f"{name}_bytes"]) for name in SIZES)
        devices.add_row(_short(one["device"]), *amounts, f"{one['percent']:.0f}")
    console.print(devices)
    engines = Table("replica", "model", "state", "granted", "measured", "KV tokens", "routers", "sessions", "in use")
    for one in found["engines"]:
        measured = "" if one["measured_bytes"] is None else _gb(one["measured_bytes"])
        tokens = (str(one[name]) for name in ("kv_tokens", "kv_tokens_routers", "kv_tokens_sessions", "kv_tokens_used"))
        engines.add_row(one["replica"], one["model"] or "", one["state"], _gb(one["granted_bytes"]), measured, *tokens)
    console.print(engines)
    queues = _queues_table(found["lines"])
    if queues.row_count:
        console.print(queues)
    for one in found["waiting"]:
        why = f"blocked: memory, for {one['waits_s']:.0f} s: {one['why']}"
        say(f"{one['replica']} of {one['model']}: {why}", style="yellow")
    for one in found["kept"]:
        whose = one["replica"] or (f"the restart of {one['after']}" if one["after"] else "its next start")
        say(f"{one['model']}: {_gb(one['bytes'])} of {_short(one['device'])} are kept for {whose}")
    for one in found["short"]:
        say(f"{one['model']}: no more replicas: {one['why']}", style="yellow")
    for one in found["alarms"]:
        memory = f"{_gb(one['measured_bytes'])} of {_gb(one['granted_bytes'])} granted on {_short(one['device'])}"
        drains = "; it drains" if one["replica"] in found["draining"] else ""
        say(f"{one['replica']} of {one['model']} uses {memory}{drains}", style="red")
    if found["sessions"]:
        sessions = Table("session", "model", "replica", "asked", "KV tokens", "ends in")
        for one in found["sessions"]:
            texts = (str(one[name]) for name in ("session", "model", "replica", "asked", "tokens"))
            sessions.add_row(*texts, f"{one['expires_in_s']} s")
        console.print(sessions)


def _queues_table(queues: Sequence[Mapping[str, Any]]) -> Table:
    """The waiting requests by model and class, and the tenants with most of them."""
    table = Table("queue of", "class", "waiting", "tokens", "granted", "comes free", "longest wait", "most waiting")
    for one in queues:
        most = max(one["tenants"], key=lambda name: one["tenants"][name]["waiting"], default="")
        for name, level in reversed(one["classes"].items()):
            if level["waiting"]:
                rate = level["drain_slots_per_s"]
                free = "" if rate is None else f"{rate:.1f}/s"
                counts = (str(level[what]) for what in ("waiting", "waiting_tokens", "granted"))
                table.add_row(one["model"], name, *counts, free, f"{one['oldest_wait_s']:.1f} s", escape(most))
    return table


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB"


def _short(device: str) -> str:
    """A device's key with the node's id shortened to a distinct prefix."""
    node, _, index = device.rpartition("/")
    return f"{node[:8]}/{index}"
