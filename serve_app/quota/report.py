"""The quota report: the ledger's state as plain figures; decides nothing."""

from __future__ import annotations

from typing import Any

from serve_app.core.memory import BlockedEngine, DeviceUse, Lease, LeaseKind, OveruseAlarm, Reservation, slots_of
from serve_app.core.quota import Quota

FRAGMENTED = 0.3  # usual bound above which defragmentation pays


def figures(core: Quota, now: float, defrag_above: float | None = None) -> dict[str, Any]:
    """Devices, engines, routers' shares, sessions, waiting engines and reservations as JSON values.

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
        "draining": core.grants.draining(),
        "devices": devices,
        "engines": [_engine(core, lease) for lease in core.ledger.leases(LeaseKind.ENGINE)],
        "waiting": [_waiting(one) for one in core.grants.blocked(now)],
        "kept": [_reservation(one) for one in core.grants.reservations.all()],
        "short": [{"model": model, "why": why} for model, why in sorted(core.starts.shortages(now).items())],
        "alarms": [_alarm(one) for one in core.grants.alarms()],
        "sessions": [
            {
                "session": one.session_id,
                "model": one.model,
                "replica": one.engine,
                "tokens": one.tokens,
                "asked": one.requested_size,
                "expires_in_s": round(one.expires_at - now, 1),
            }
            for one in core.sessions.all(now)
        ],
        "sessions_waiting": [
            {"session": one.session_id, "model": one.model, "tokens": one.tokens}
            for one in core.queue.session_admission.waiting()
        ],
        "lines": [_model_queue(core, model, now) for model in sorted(core.queue.granting.models)],
        "overdrawn_tokens": core.queue.accounts.overdrawn,
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


def _waiting(one: BlockedEngine) -> dict[str, Any]:
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


def _reservation(one: Reservation) -> dict[str, Any]:
    return {
        "model": one.model,
        "device": one.hold.on,
        "bytes": one.hold.amount,
        "replica": one.replica,
        "after": one.replaces,
    }


def _alarm(one: OveruseAlarm) -> dict[str, Any]:
    return {
        "replica": one.owner,
        "model": one.model,
        "device": one.device,
        "granted_bytes": one.granted_bytes,
        "measured_bytes": one.measured_bytes,
    }


def _model_queue(core: Quota, model: str, now: float) -> dict[str, Any]:
    """A model's queue. Counters begin with the actor and do not include grants on routers' credit."""
    line = core.queue.granting.models[model]
    found = line.admission.snapshot(now)
    return {
        "model": model,
        "routers": sorted(line.routers),
        "replicas": sorted(name for name in line.engines if line.is_open(name)),
        "contended": model in core.queue.actor_sessions.state.contended,
        "oldest_wait_s": round(found.oldest_wait_s, 2),
        "drain_slots_per_s": found.drain_slots_per_s,
        "refused": dict(found.refused),
        "classes": {
            name: {
                "waiting": one.waiting,
                "waiting_tokens": one.waiting_tokens,
                "granted": one.granted,
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


def _sum_or_none(measured: tuple[int | None, ...]) -> int | None:
    """The sum; None if a part could not be measured."""
    found = [one for one in measured if one is not None]
    return sum(found) if found and len(found) == len(measured) else None


def _engine(core: Quota, lease: Lease) -> dict[str, Any]:
    told = core.grants.last_report(lease.lease_id)
    held = dict.fromkeys((LeaseKind.SHARE, LeaseKind.SESSION), 0)
    shares: dict[str, int] = {}
    pool = slots_of(lease.lease_id)
    booked = core.ledger.limit(pool) - core.ledger.free(pool) if pool in core.ledger else 0
    for child in core.ledger.leases_on(lease.lease_id):
        held[child.kind] = held.get(child.kind, 0) + child.amount
        if child.kind is LeaseKind.SHARE:
            router = child.owner
            shares[router] = shares.get(router, 0) + child.amount
    slots, used = core.queue.in_use(lease.lease_id)
    return {
        "replica": lease.lease_id,
        "model": None if told is None else told.model,
        "state": lease.phase.value,
        "devices": {hold.on: hold.amount for hold in lease.holds},
        "granted_bytes": lease.amount,
        "measured_bytes": None if told is None else _sum_or_none(told.measured_bytes),
        "kv_tokens": lease.capacity,
        "kv_tokens_routers": held[LeaseKind.SHARE],
        "kv_tokens_by_router": shares,
        "kv_tokens_sessions": held[LeaseKind.SESSION],
        "kv_tokens_used": used,
        "slots": None if told is None else told.slots,
        "slots_booked": booked,
        "slots_used": slots,
        "kv_tokens_free": core.ledger.free(lease.lease_id),
    }
