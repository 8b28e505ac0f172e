"""The object of `GET /console/live`, of what was found: all of it for operators, one tenant's own part for its keys.

Invariant: a tenant's view is the same whatever other tenants do: it is made of its own rows, sessions, batches and
rates, and of facts of the models that it may use. Each list of a view is bounded; `left_off` counts what it lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve_app.core.batches import BatchRecord
from serve_app.core.live.leases import memory_view
from serve_app.core.live.parts import LiveModel, QuotaPart, RouterPart, WaitingRow, merged_rows
from serve_app.core.live.rates import Rates
from serve_app.core.live.shown import Plain, Shown, cut
from serve_app.core.queue import OTHER_TENANTS

MAX_ROWS = 400  # of queues, over all models: some 50 kB, half of what two seconds may carry
MAX_REPLICAS = 300
MAX_SESSIONS = 200
MAX_BATCHES = 50
MAX_ROUTERS = 64
UNKNOWN = "unknown"  # state of a model of which Serve's controller says nothing
STATES = {"reserved": "STARTING", "committed": "RUNNING", "ending": "STOPPING"}  # Serve's words for a lease's phase
DRAINING = "DRAINING"


@dataclass(frozen=True, slots=True)
class Found:
    """The last answers.

    Args:
        time: of this moment, in ISO 8601.
        models: those that are served now.
        state: as of GET /admin/status; None: Serve's controller does not answer.
        quota: None: the quota actor does not answer. routers: by id, those that answer.
        rates: see `rates`. batches: None: the store does not answer.
        missing: what does not answer.
    """

    time: str
    models: Mapping[str, LiveModel]
    state: Mapping[str, Any] | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    quota: QuotaPart | None = None
    routers: Mapping[str, RouterPart] = field(default_factory=dict)
    rates: Rates = field(default_factory=dict)
    batches: Sequence[tuple[BatchRecord, str, str | None]] | None = None  # with both its times in ISO 8601
    missing: tuple[str, ...] = ()


class _Known(NamedTuple):
    """One model as the sources know it."""

    name: str
    facts: LiveModel
    state: Mapping[str, Any]
    running: int


def operator_view(found: Found) -> Plain:
    """Everything."""
    shown = Shown()
    largest = sorted(merged_rows(_rows(found)), key=lambda row: -row.waiting)
    rows = shown.first("queues", largest, MAX_ROWS)
    replicas = _Replicas(found)
    models = []
    for known in _known(found):
        entry = _model(known)
        entry["reason"] = cut(known.state.get("message") or known.state.get("cause") or "")
        entry["why"] = "; ".join(filter(None, (cut(known.state.get("why") or ""), _advice(known.state))))
        entry["waiting"] = _waiting(found, known.name)
        entry["queues"] = [_queue(row) for row in rows if row.model == known.name]
        entry["replicas"] = [replicas.shown(one) for one in shown.first("replicas", replicas.of(known), MAX_REPLICAS)]
        models.append(entry | _rates(found, known.name, None))
    sessions = () if found.quota is None else found.quota.sessions
    memory = memory_view(found.quota, found.addresses, shown)
    return {
        "time": found.time,
        "scope": "all",
        "tenant": None,
        "missing": list(found.missing),
        "models": models,
        "memory": memory | {"sessions": [dict(one) for one in shown.first("sessions", sessions, MAX_SESSIONS)]},
        "routers": shown.first("routers", _routers(found), MAX_ROUTERS),
        "batches": _batches(shown, found.batches or ()),
        "left_off": shown.left_off,
    }


def tenant_view(found: Found, tenant: str, usable: frozenset[str] | None) -> Plain:
    """What a key of this tenant sees. `usable`: the models that it may use; None: all."""
    shown = Shown()
    own = [row for row in _rows(found) if row.tenant == tenant and (usable is None or row.model in usable)]
    rows = shown.first("queues", merged_rows(own, None), MAX_ROWS)
    replicas = _Replicas(found)
    models = []
    for known in _known(found):
        if usable is None or known.name in usable:
            entry = _model(known)
            queues = [row for row in rows if row.model == known.name]
            entry |= {"reason": "", "why": "", "waiting": sum(row.waiting for row in queues)}
            entry["queues"] = [_queue(row) for row in queues]
            of_model = shown.first("replicas", replicas.of(known), MAX_REPLICAS)
            entry["replicas"] = [_without_others(replicas.shown(one)) for one in of_model]
            models.append(entry | _rates(found, known.name, tenant))
    every = () if found.quota is None else found.quota.sessions
    sessions = [dict(one) for one in every if one["tenant"] == tenant and (usable is None or one["model"] in usable)]
    batches = [one for one in found.batches or () if one[0].tenant == tenant]
    return {
        "time": found.time,
        "scope": "tenant",
        "tenant": tenant,
        "missing": sorted({name.partition(" ")[0] for name in found.missing}),  # no name of a router
        "models": models,
        "memory": {
            "fragmentation": None,
            "devices": [],
            "sessions": shown.first("sessions", sessions, MAX_SESSIONS),
            "waiting": [],
        },
        "routers": [],
        "batches": _batches(shown, batches),
        "left_off": shown.left_off,
    }


def _rows(found: Found) -> list[WaitingRow]:
    """The quota actor's rows; without it the routers', who have them then."""
    if found.quota is not None:
        return list(found.quota.rows)
    return [row for part in found.routers.values() for row in part.rows]


def _waiting(found: Found, model: str) -> int:
    """Requests that wait anywhere: the routers know more than the queue's, and may be asked at another moment."""
    queued = 0 if found.quota is None else found.quota.waiting.get(model, 0)
    return max(queued, sum(part.waiting.get(model, 0) for part in found.routers.values()))


def _known(found: Found) -> list[_Known]:
    states = {one["name"]: one for one in (found.state or {}).get("models", ())}
    known = []
    for name, facts in sorted(found.models.items()):
        state = states.get(name, {})
        if state:
            running = sum(one["state"] in ("RUNNING", DRAINING) for one in state["replicas"])
        else:
            running = max((part.running.get(name, 0) for part in found.routers.values()), default=0)
        known.append(_Known(name, facts, state, running))
    return known


def _advice(state: Mapping[str, Any]) -> str:
    """What a second policy would want; empty: there is none."""
    advised = state.get("advised")
    return "" if advised is None else cut(f"{advised} advised: {state.get('advice', '')}")


def _model(known: _Known) -> Plain:
    return {
        "model": known.name,
        "state": known.state.get("state", UNKNOWN),
        "running": known.running,
        "wanted": known.state.get("target"),
        "waiting_bound": known.facts.waiting_bound,
        "cold": known.facts.scales_to_zero and not known.running,
    }


def _queue(row: WaitingRow) -> Plain:
    return {
        "class": row.request_class,
        "tenant": OTHER_TENANTS if row.tenant is None else row.tenant,
        "waiting": row.waiting,
        "oldest_s": round(row.oldest_s, 1),
        "reasons": dict(sorted(row.reasons.items())),
    }


def _rates(found: Found, model: str, tenant: str | None) -> Plain:
    """None: not known yet, since it takes two looks."""
    requests, tokens = found.rates.get((model, tenant), (None, None))
    return {
        "requests_per_s": None if requests is None else round(requests, 2),
        "tokens_per_s": None if tokens is None else round(tokens, 1),
    }


class _Replicas:
    """Engine replicas, of what Serve, the quota actor and the routers know."""

    def __init__(self, found: Found) -> None:
        figures = {} if found.quota is None else found.quota.figures
        self._engines = {one["replica"]: one for one in figures.get("engines", ())}
        self._draining = set(figures.get("draining", ()))
        self._addresses = found.addresses
        self._routers = found.routers.values()
        self._has_all_routers = not any(name.startswith("router ") for name in found.missing)
        self._ejected = {name for part in self._routers for name in part.ejected}

    def of(self, known: _Known) -> list[Plain]:
        """Those of a model: as Serve has them, else as the quota actor has."""
        if known.state:
            return [dict(one) for one in known.state["replicas"]]
        engines = [one for one in self._engines.values() if one["model"] == known.name]
        return [
            {"id": one["replica"], "state": STATES.get(one["state"], one["state"]), "node": _node(one), "address": ""}
            for one in engines
        ]

    def shown(self, replica: Mapping[str, Any]) -> Plain:
        name = replica["id"]
        engine = self._engines.get(name, {})
        of_routers = [part.slots[name] for part in self._routers if name in part.slots]
        slots = [sum(used for used, _ in of_routers), engine.get("slots_used") or 0]
        tokens = [sum(part.kv_used.get(name, 0) for part in self._routers), engine.get("kv_tokens_used") or 0]
        fresh = slice(
            1 if self._has_all_routers and of_routers else 2
        )  # the quota actor's are those of the last report
        node = replica["node"]
        is_draining = replica["state"] == DRAINING or name in self._draining
        # Serve looks every few seconds and gives it three looks: the quota actor misses its reports sooner
        is_silent = replica["state"] == "RUNNING" and engine.get("state") == "ending" and not is_draining
        return {
            "replica": name,
            "node": node,
            "address": replica["address"] or self._addresses.get(node, ""),
            "state": replica["state"],
            "slots_used": max(slots[fresh]),
            "slots_total": engine.get("slots") or max((of_replica for _, of_replica in of_routers), default=0),
            "kv_used": max(tokens[fresh]),
            "kv_total": engine.get("kv_tokens") or 0,
            "draining": is_draining,
            "ejected": name in self._ejected,
            "silent": is_silent,
        }


def _node(engine: Mapping[str, Any]) -> str:
    return next((str(device).rpartition("/")[0] for device in engine["devices"]), "")


def _without_others(replica: Plain) -> Plain:
    """A replica for one tenant: what runs there is of all tenants, where it runs is no tenant's concern."""
    return replica | {
        "node": None,
        "address": None,
        "slots_used": None,
        "kv_used": None,
        "ejected": False,
        "silent": False,
    }


def _routers(found: Found) -> list[Plain]:
    known = {one["id"]: str(one["state"]) for one in (found.state or {}).get("routers", ())}
    names = sorted(known.keys() | found.routers.keys())
    return [{"name": name, "state": known.get(name, "RUNNING")} for name in names]


def _batches(shown: Shown, batches: Iterable[tuple[BatchRecord, str, str | None]]) -> list[Plain]:
    return [
        {
            "id": batch.batch_id,
            "tenant": batch.tenant,
            "status": batch.status.value,
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
            "created_at": created_at,
            "expires_at": expires_at,
        }
        for batch, created_at, expires_at in shown.first("batches", list(batches), MAX_BATCHES)
    ]
