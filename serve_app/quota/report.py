"""What the ledger looks like from outside: plain figures, and nothing that is decided."""

from __future__ import annotations

from typing import Any

from serve_app.core.memory import Alarm, Berth, Blocked, DeviceUse, Kind, Lease, slots_of
from serve_app.core.quota import Quota

FRAGMENTED = 0.3  # the usual bound above which making room pays


def figures(core: Quota, now: float, defrag_above: float | None = None) -> dict[str, Any]:
    """Devices, engines, routers' shares, sessions, who waits and what is kept for starts, as JSON can carry them.

    In bytes and KV tokens."""
    devices = [_device(use) for use in core.ledger.devices()]
    fragmentation, by_node = core.relocation.fragmentation()
    return {
        "epoch": core.epoch,
        "recovering": core.recovering,
        "total_bytes": sum(one["total_bytes"] for one in devices),
        "reserved_bytes": sum(one["reserved_bytes"] for one in devices),
        "granted_bytes": sum(one["granted_bytes"] for one in devices),
        "free_bytes": sum(one["free_bytes"] for one in devices),
        "fragmentation": round(fragmentation, 4),
        "fragmentation_by_node": {node: round(by_node[node], 4) for node in sorted(by_node)},
        "fragmented": fragmentation > (FRAGMENTED if defrag_above is None else defrag_above),
        "draining": core.grants.leaving(),
        "devices": devices,
        "engines": [_engine(core, lease) for lease in core.ledger.leases(Kind.ENGINE)],
        "waiting": [_waiting(one) for one in core.grants.blocked(now)],
        "kept": [_kept(one) for one in core.grants.berths.all()],
        "short": [{"model": model, "why": why} for model, why in sorted(core.starts.notes(now).items())],
        "alarms": [_alarm(one) for one in core.grants.alarms()],
        "sessions": [
            {
                "session": one.session_id,
                "model": one.model,
                "replica": one.pool,
                "tokens": one.tokens,
                "asked": one.given,
                "expires_in_s": round(one.expires_at - now, 1),
            }
            for one in core.sessions.all(now)
        ],
        "sessions_waiting": [
            {"session": one.session_id, "model": one.model, "tokens": one.tokens}
            for one in core.lines.openings.waiting()
        ],
        "lines": [_line(core, model, now) for model in sorted(core.lines.places.lines)],
        "overdrawn_tokens": core.lines.accounts.overdrawn,
    }


def _device(use: DeviceUse) -> dict[str, Any]:
    return {
        "device": use.device.key,
        "node": use.device.node,
        "total_bytes": use.device.total_bytes,
        "reserved_bytes": use.device.reserved_bytes,
        "granted_bytes": use.held_bytes,
        "free_bytes": use.free_bytes,
        "percent": round(100 * use.held_bytes / max(1, use.device.capacity_bytes), 1),
    }


def _waiting(one: Blocked) -> dict[str, Any]:
    return {
        "replica": one.owner,
        "model": one.model,
        "state": "blocked: memory",
        "ranks": one.ranks,
        "wanted_bytes": one.wanted_bytes,
        "least_bytes": one.least_bytes,
        "waits_s": round(one.waits_s, 1),
        "why": one.why,
    }


def _kept(one: Berth) -> dict[str, Any]:
    return {
        "model": one.model,
        "device": one.hold.on,
        "bytes": one.hold.amount,
        "replica": one.replica,
        "after": one.after,
    }


def _alarm(one: Alarm) -> dict[str, Any]:
    return {
        "replica": one.owner,
        "model": one.model,
        "device": one.device,
        "granted_bytes": one.granted_bytes,
        "measured_bytes": one.measured_bytes,
    }


def _line(core: Quota, model: str, now: float) -> dict[str, Any]:
    """A model's line. Counters begin with the actor; what routers granted from their credit is none of them."""
    line = core.lines.places.lines[model]
    found = line.admission.snapshot(now)
    return {
        "model": model,
        "routers": sorted(line.routers),
        "replicas": sorted(name for name in line.engines if line.open(name)),
        "contended": model in core.lines.peers.word.contended,
        "oldest_wait_s": round(found.oldest_wait_s, 2),
        "drain_slots_per_s": found.drain_slots_per_s,
        "refused": dict(found.refused),
        "classes": {
            name: {
                "waiting": one.waiting,
                "waiting_tokens": one.waiting_tokens,
                "granted": found.granted[name],
                "granted_tokens": one.granted_tokens,
                "drain_slots_per_s": one.drain_slots_per_s,
            }
            for name, one in found.classes.items()
        },
        "tenants": {
            name: {
                "waiting": one.waiting,
                "waiting_tokens": one.waiting_tokens,
                "slots": one.slots,
                "kv_tokens": one.kv_tokens,
                "below_share": one.below_share,
            }
            for name, one in found.tenants.items()
        },
    }


def _whole(measured: tuple[int | None, ...]) -> int | None:
    """The sum; None where a part of it could not be measured."""
    found = [one for one in measured if one is not None]
    return sum(found) if found and len(found) == len(measured) else None


def _engine(core: Quota, lease: Lease) -> dict[str, Any]:
    told = core.grants.told(lease.lease_id)
    held = dict.fromkeys((Kind.SHARE, Kind.SESSION), 0)
    shares: dict[str, int] = {}
    pool = slots_of(lease.lease_id)
    booked = core.ledger.limit(pool) - core.ledger.free(pool) if pool in core.ledger else 0
    for child in core.ledger.on(lease.lease_id):
        held[child.kind] = held.get(child.kind, 0) + child.amount
        if child.kind is Kind.SHARE:
            router = child.owner
            shares[router] = shares.get(router, 0) + child.amount
    slots, used = core.lines.used(lease.lease_id)
    return {
        "replica": lease.lease_id,
        "model": None if told is None else told.model,
        "state": lease.phase.value,
        "devices": {hold.on: hold.amount for hold in lease.holds},
        "granted_bytes": lease.amount,
        "measured_bytes": None if told is None else _whole(told.measured_bytes),
        "kv_tokens": lease.capacity,
        "kv_tokens_routers": held[Kind.SHARE],
        "kv_tokens_by_router": shares,
        "kv_tokens_sessions": held[Kind.SESSION],
        "kv_tokens_used": used,
        "slots": None if told is None else told.slots,
        "slots_booked": booked,
        "slots_used": slots,
        "kv_tokens_free": core.ledger.free(lease.lease_id),
    }
