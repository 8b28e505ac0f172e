"""`serve-app quota` and `serve-app defrag`: fetch the ledger of GPU memory, or a plan, and print it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console

from serve_app.cli.endpoint import Endpoint
from serve_app.cli.layout import Listing, show_unrecorded
from serve_app.cli.operators import fetch_soon
from serve_app.cluster.local import ask
from serve_app.errors import Unavailable
from serve_app.settings import GB

SIZES = ("total", "reserved", "granted", "free")
ENGINE_COLUMNS = ("replica", "model", "state", "granted", "measured", "KV tokens", "routers", "sessions", "in use")
QUEUE_COLUMNS = ("queue of", "class", "waiting", "tokens", "granted", "comes free", "longest wait", "most waiting")


def fetch_quota(endpoint: Endpoint) -> dict[str, Any]:
    """The quota actor's figures, by HTTP. Raises ServeAppError."""
    return fetch_soon(endpoint, "GET", "/admin/quota")  # type: ignore[no-any-return]


def fetch_plan(endpoint: Endpoint, *, begin: bool) -> dict[str, Any]:
    """The `plan` that frees memory for the first waiting engine, which begins then. Raises ServeAppError."""
    return fetch_soon(endpoint, "POST" if begin else "GET", "/admin/defrag")  # type: ignore[no-any-return]


def ask_actor(question: str, environment: Mapping[str, str], **options: Any) -> dict[str, Any]:
    """The quota actor's answer through Ray: its figures ("quota"), or with "defrag" the `plan` that frees memory for
    the first waiting engine; the plan is None if no engine waits, or no plan helps.

    Args:
        environment: of a driver of the cluster.

    Raises:
        Unavailable: no cluster answers there, or it has no quota actor.
    """
    answer = ask({"do": question, "environment": dict(environment), **options})
    if not answer:
        raise Unavailable("the cluster did not answer", code="not_running")
    return answer


def show_plan(found: Mapping[str, Any], console: Console) -> None:
    """Print the `plan`, and whether it is `begun`."""
    listing = Listing(console)
    device = _device_names(found.get("addresses", {}))
    plan = found["plan"]
    show_unrecorded(found, console)
    if plan is None:
        listing.say("Nothing to do: no engine waits for memory, or no restart would free enough.")
        return
    waits = plan["waits"]
    wanted = f"{waits['ranks']} x {_gb(waits['least_bytes'])}"
    record = ("waits", waits["owner"], waits["model"], str(waits["ranks"]), _gb(waits["least_bytes"]))
    listing.say(f"{waits['owner']} of {waits['model']} waits for {wanted}", record)
    rows = [
        (
            str(number),
            step["owner"],
            step["model"],
            *(", ".join(map(device, step[name])) for name in ("source", "target")),
            _gb(step["bytes_to_move"]),
        )
        for number, step in enumerate(plan["steps"], start=1)
    ]
    listing.table("step", ("step", "replica", "model", "drains on", "expected on", "to load"), rows)
    listing.say("Begun: one replica at a time." if found["begun"] else "Only planned; `serve-app defrag` does it.", ())


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print the figures: devices, engines, queues, sessions, and a sentence for each wait, reservation and alarm."""
    listing = Listing(console)
    device = _device_names(found.get("addresses", {}))
    sizes = [_gb(found[f"{name}_bytes"]) for name in SIZES]
    parts = [f"{name} {size}" for name, size in zip(SIZES, sizes, strict=True)]
    parts.append(f"fragmentation {found['fragmentation']:.2f}")
    if found["recovering"]:
        parts.append("(the ledger is being rebuilt)")
    listing.flow(parts, ("memory", *sizes, f"{found['fragmentation']:.2f}"))
    if found["fragmented"]:
        share = f"{found['fragmentation']:.0%} of what is free lies where the models here do not fit"
        _note(listing, "fragmented", f"{share}; `serve-app defrag` frees memory for one that waits", "yellow")
    devices = [
        (device(one["device"]), *(_gb(one[f"{name}_bytes"]) for name in SIZES), f"{one['percent']:.0f}")
        for one in found["devices"]
    ]
    listing.table("device", ("device", *SIZES, "%"), devices)
    listing.table("engine", ENGINE_COLUMNS, map(_engine, found["engines"]))
    listing.table("queue", QUEUE_COLUMNS, _queues(found))
    for kind, text, style in _notes(found, device):
        _note(listing, kind, text, style)
    sessions = [
        (*(str(one[name]) for name in ("session", "model", "replica", "asked", "tokens")), f"{one['expires_in_s']} s")
        for one in found["sessions"]
    ]
    listing.table("session", ("session", "model", "replica", "asked", "KV tokens", "ends in"), sessions)


def _note(listing: Listing, kind: str, text: str, style: str) -> None:
    listing.say(text, (kind, text), style=style)


def _notes(found: Mapping[str, Any], device: Callable[[str], str]) -> Iterator[tuple[str, str, str]]:
    """Kind, text and style of what is to be said of waits, reservations and alarms."""
    for engine in found["waiting"]:
        why = f"blocked: memory, for {engine['waits_s']:.0f} s: {engine['why']}"
        yield "waiting", f"{engine['replica']} of {engine['model']}: {why}", "yellow"
    for kept in found["kept"]:
        whose = kept["replica"] or (f"the restart of {kept['after']}" if kept["after"] else "its next start")
        yield "kept", f"{kept['model']}: {_gb(kept['bytes'])} of {device(kept['device'])} are kept for {whose}", ""
    for shortage in found["short"]:
        yield "short", f"{shortage['model']}: no more replicas: {shortage['why']}", "yellow"
    for failure in found.get("failures", ()):  # an actor of the release before, at an upgrade, tells none
        yield "failure", f"{failure['model']}: an engine failed {failure['ago_s']:.0f} s ago: {failure['why']}", "red"
    for alarm in found["alarms"]:
        memory = f"{_gb(alarm['measured_bytes'])} of {_gb(alarm['granted_bytes'])} granted on {device(alarm['device'])}"
        drains = "; it drains" if alarm["replica"] in found["draining"] else ""
        yield "alarm", f"{alarm['replica']} of {alarm['model']} uses {memory}{drains}", "red"


def _engine(engine: Mapping[str, Any]) -> tuple[str, ...]:
    measured = "" if engine["measured_bytes"] is None else _gb(engine["measured_bytes"])
    tokens = (str(engine[name]) for name in ("kv_tokens", "kv_tokens_routers", "kv_tokens_sessions", "kv_tokens_used"))
    return engine["replica"], engine["model"] or "", engine["state"], _gb(engine["granted_bytes"]), measured, *tokens


def _queues(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The waiting requests by model and class, and the tenant with most of them."""
    for queue in found["queues"] if "queues" in found else found["lines"]:  # an actor of 0.5 gives only `lines`
        most = max(queue["tenants"], key=lambda name: queue["tenants"][name]["waiting"], default="")
        for name, level in reversed(queue["classes"].items()):
            if level["waiting"]:
                rate = level["drain_slots_per_s"]
                free = "" if rate is None else f"{rate:.1f}/s"
                counts = (str(level[what]) for what in ("waiting", "waiting_tokens", "granted"))
                yield queue["model"], name, *counts, free, f"{queue['oldest_wait_s']:.1f} s", most


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB"


def _device_names(addresses: Mapping[str, str]) -> Callable[[str], str]:
    """Names for devices' keys: the node's address instead of its id, where it tells the node."""

    def name(device: str) -> str:
        node, _, index = device.rpartition("/")
        address = addresses.get(node, "")
        return f"{address}/{index}" if list(addresses.values()).count(address) == 1 else device

    return name
