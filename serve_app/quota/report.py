"""The quota report: the ledger's state as plain figures; decides nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from serve_app.core.memory import BlockedEngine, DeviceUse, Drain, Lease, LeaseKind, Session
from serve_app.core.messages import message
from serve_app.core.quota import Quota

SIZES = ("total_bytes", "reserved_bytes", "granted_bytes", "free_bytes")
FRAGMENTED = 0.3  # usual bound above which defragmentation pays


@message
@dataclass(frozen=True, slots=True)
class ModelFiguresRequest:
    """Asks for the figures of all models' queues."""


def fragmentation_bound(defrag_above: float | None) -> float:
    """The fragmentation above which a node or the cluster is called fragmented."""
    return FRAGMENTED if defrag_above is None else defrag_above


def figures(core: Quota, now: float, defrag_above: float | None = None) -> dict[str, Any]:
    """Devices, engines, routers' shares, sessions, waiting engines and reservations as JSON values.

    In bytes and KV tokens."""
    devices = [_device(use) for use in core.ledger.devices()]
    fragmentation, by_node = core.relocation.fragmentation()
    queues = [_model_queue(core, model, now) for model in sorted(core.queue.models.by_name)]
    return {
        "epoch": core.epoch,
        "recovering": core.recovering,
        **{name: sum(one[name] for one in devices) for name in SIZES},
        "fragmentation": round(fragmentation, 4),
        "fragmentation_by_node": {node: round(by_node[node], 4) for node in sorted(by_node)},
        "fragmented": fragmentation > fragmentation_bound(defrag_above),
        "draining": core.grants.drains.active(),
        "crash_loops": [asdict(one) for one in core.grants.crash_loops.all(now)],
        "failures": [asdict(one) for one in core.grants.crash_loops.failures(now)],
        "drains": [_drain(one, now) for one in core.grants.drains.all()],
        "devices": devices,
        "engines": [_engine(core, lease) for lease in core.ledger.leases(LeaseKind.ENGINE)],
        "starting": _starting(core),
        "waiting": [_waiting(one) for one in core.grants.blocked(now)],
        "kept": [
            {
                "model": one.model,
                "device": one.hold.on,
                "bytes": one.hold.amount,
                "replica": one.replica,
                "after": one.replaces,
            }
            for one in core.grants.reservations.all()
        ],
        "short": [{"model": model, "why": why} for model, why in sorted(core.starts.shortages(now).items())],
        "alarms": [asdict(one) for one in core.grants.alarms()],
        "sessions": [_session(one, now) for one in core.sessions.all()],
        "sessions_waiting": [
            {"session": one.session_id, "model": one.model, "tokens": one.tokens}
            for one in core.queue.session_admission.waiting()
        ],
        "queues": queues,
        "lines": queues,  # the name of `queues` until 0.5.0: given beside it in 0.6, gone with 0.7
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


def _drain(drain: Drain, now: float) -> dict[str, Any]:
    """An engine that drains, or has."""
    return {
        "replica": drain.replica,
        "model": drain.model,
        "why": drain.why,
        "ended": drain.ended_at is not None,
        "final": drain.is_final,
        "running": drain.progress.running,
        "finished": drain.progress.finished,
        "moved": drain.progress.moved,
        "left_s": round(max(0.0, drain.until - now), 1),
    }


def _session(session: Session, now: float) -> dict[str, Any]:
    return {
        "session": session.request.session_id,
        "model": session.request.model,
        "replica": session.engine,
        "tokens": session.request.tokens,
        "asked": session.request.requested_size,
        "expires_in_s": round(session.expires_at - now, 1),
        "taken_back_in_s": None if session.taken_back_at is None else round(session.taken_back_at - now, 1),
    }


def _starting(core: Quota) -> list[dict[str, Any]]:
    """How far the start of each engine that loads is."""
    reports = filter(None, map(core.grants.last_report, core.grants.owners()))
    return [{"replica": one.owner, "model": one.model, **asdict(one.start)} for one in reports if one.start is not None]


def _waiting(engine: BlockedEngine) -> dict[str, Any]:
    fields = asdict(engine)
    return {"replica": fields.pop("owner"), "state": "blocked: memory"} | fields | {"waits_s": round(engine.waits_s, 1)}


def _model_queue(core: Quota, model: str, now: float) -> dict[str, Any]:
    """A model's queue. Counters begin with the actor and do not include grants on routers' credit."""
    queue = core.queue.models.by_name[model]
    found = queue.admission.snapshot(now)
    return {
        "model": model,
        "routers": sorted(queue.routers),
        "replicas": sorted(name for name in queue.engines if queue.is_open(name)),
        "contended": model in core.queue.router_sessions.state.contended,
        "oldest_wait_s": round(found.oldest_wait_s, 2),
        "drain_slots_per_s": found.drain_slots_per_s,
        "refused": dict(found.refused),
        "classes": {name: asdict(one) for name, one in found.classes.items()},
        "tenants": {name: asdict(one) for name, one in found.tenants.items()},
    }


def _engine(core: Quota, lease: Lease) -> dict[str, Any]:
    last = core.grants.last_report(lease.lease_id)
    model, measured, all_slots = (None, (), None) if last is None else (last.model, last.measured_bytes, last.slots)
    pool = core.ledger.pool(lease.lease_id)
    accounts = {} if pool is None else {who.name: one.tokens for who, one in pool.accounts.items() if one.tokens}
    slots, used = core.queue.in_use(lease.lease_id)
    return {
        "replica": lease.lease_id,
        "model": model,
        "state": lease.phase.value,
        "devices": {hold.on: hold.amount for hold in lease.holds},
        "granted_bytes": lease.amount,
        "measured_bytes": sum(filter(None, measured)) if measured and None not in measured else None,
        "kv_tokens": lease.capacity,
        "kv_tokens_routers": sum(accounts.values()),
        "kv_tokens_by_router": accounts,
        "kv_tokens_sessions": sum(one.amount for one in core.ledger.leases_on(lease.lease_id)),
        "kv_tokens_used": used,
        "slots": all_slots,
        "slots_booked": 0 if pool is None else pool.slots - pool.free_slots,
        "slots_used": slots,
        "kv_tokens_free": core.ledger.free(lease.lease_id),
    }
