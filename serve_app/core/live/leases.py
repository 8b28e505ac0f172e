"""GPU memory as a map: each device with its leases.

Invariant: the bytes of a device's leases are counted once: what sessions hold of an engine is taken out of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from serve_app.core.live.parts import QuotaPart
from serve_app.core.live.shown import Plain, Shown, cut

MAX_DEVICES = 256
MAX_LEASES = 600  # over all devices
MAX_WAITING = 50
STATES = {"reserved": "loading", "committed": "running", "ending": "ending"}  # of an engine's lease, for operators


def memory_view(quota: QuotaPart | None, addresses: Mapping[str, str], shown: Shown) -> Plain:
    """Devices with leases, fragmentation, and the engines that wait for memory; without the sessions."""
    if quota is None:
        return {"fragmentation": None, "devices": [], "waiting": []}
    leases = _leases(quota)
    devices = []
    for device in shown.first("devices", quota.figures["devices"], MAX_DEVICES):
        node = device["node"]
        key = device["device"]
        devices.append(
            {
                "node": node,
                "address": addresses.get(node, ""),
                "device": key,
                "total_bytes": device["total_bytes"],
                "reserved_bytes": device["reserved_bytes"],
                "free_bytes": device["free_bytes"],
                "leases": shown.first("leases", leases.get(key, []), MAX_LEASES),
            }
        )
    waiting = shown.first("waiting", quota.figures["waiting"], MAX_WAITING)
    return {
        "fragmentation": quota.figures["fragmentation"],
        "devices": devices,
        "waiting": [
            {
                "owner": one["replica"],
                "model": one["model"],
                "bytes": one["wanted_bytes"] * one["ranks"],
                "reason": cut(one["why"]),
            }
            for one in waiting
        ],
    }


def _leases(quota: QuotaPart) -> dict[str, list[Plain]]:
    """The leases on each device, by its key: engines, what sessions hold of them, and memory kept for starts."""
    found: dict[str, list[Plain]] = defaultdict(list)
    within: dict[str, list[Plain]] = defaultdict(list)
    sessions: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for session in quota.sessions:
        sessions[session["replica"]].append(session)
    for engine in quota.figures["engines"]:
        devices = engine["devices"]
        for device, held_bytes in devices.items():
            left = held_bytes
            of_sessions = []
            for session in sessions[engine["replica"]]:
                part = min(left, session["bytes"] // len(devices))
                left -= part
                of_sessions.append(_lease(session["session_id"], session["model"], "session", "running", part))
            found[device].append(_lease(engine["replica"], engine["model"], "engine", STATES[engine["state"]], left))
            within[device] += of_sessions
    for kept in quota.figures["kept"]:
        owner = kept["replica"] or kept["after"] or ""
        found[kept["device"]].append(_lease(owner, kept["model"], "reservation", "starting", kept["bytes"]))
    for device, of_sessions in within.items():
        found[device] += of_sessions  # last: of these there may be more than are shown
    return found


def _lease(owner: str, model: str | None, kind: str, state: str, held_bytes: int) -> Plain:
    return {"owner": owner, "model": model or "", "kind": kind, "state": state, "bytes": held_bytes}
