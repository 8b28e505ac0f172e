"""What sources may say, of two or three models and of tenants whose names and ids can be told apart."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from serve_app.core.batches import BatchRecord, BatchStatus
from serve_app.core.live import Found, LiveModel, QuotaPart, RouterPart, Wait, rates, waiting_rows

MODELS = ("chat", "code", "embed")
CLASSES = ("low", "normal", "high", "critical")
REASONS = ("turn", "slots", "kv_tokens", "guard_slots")
GB = 10**9
OTHERS = ("rival-1", "rival-2", "rival-3")

waits = st.lists(
    st.tuples(
        st.sampled_from(MODELS),
        st.sampled_from(CLASSES),
        st.floats(0, 100).map(lambda s: round(s, 1)),
        st.sampled_from(REASONS),
    ),
    max_size=12,
)
amounts = st.integers(0, 10**6)


def batch(tenant: str, number: int, **more: Any) -> BatchRecord:
    times = {"created_at": 1.0 * number, "expires_at": 2.0 * number}
    fields: dict[str, Any] = {"status": BatchStatus.IN_PROGRESS, "total": 10, "completed": 3, **times, **more}
    return BatchRecord(f"batch_{tenant}_{number}", tenant, f"key-{tenant}", "/v1/x", "file", "24h", **fields)


def session(tenant: str, number: int, **more: Any) -> dict[str, Any]:
    made = {"session_id": f"s-{tenant}-{number}", "tenant": tenant, "model": MODELS[number % 2], "replica": "e1"}
    return made | {"kv_tokens": 100, "used": 20, "bytes": GB, "expires_in_s": 30.0} | more


def figures(used: int = 0, free: int = 20 * GB) -> dict[str, Any]:
    device = {"device": "n1/0", "node": "n1", "total_bytes": 80 * GB, "reserved_bytes": 2 * GB, "free_bytes": free}
    engine = {"replica": "e1", "model": "chat", "state": "committed", "devices": {"n1/0": 40 * GB}}
    engine |= {"kv_tokens": 1000, "kv_tokens_used": used, "slots": 8, "slots_used": used % 9}
    blocked = {"replica": "e9", "model": "code", "wanted_bytes": 60 * GB, "ranks": 2, "why": "too little is free"}
    kept = {"model": "embed", "device": "n1/0", "bytes": 5 * GB, "replica": None, "after": None}
    found: dict[str, Any] = {"devices": [device], "engines": [engine], "waiting": [blocked], "kept": [kept]}
    return found | {"draining": [], "fragmentation": 0.25}


def state(message: str = "", why: str = "fixed") -> dict[str, Any]:
    replica = {"id": "e1", "state": "RUNNING", "node": "n1", "address": "10.0.0.1"}
    model = {"name": "chat", "state": "healthy", "message": message, "why": why, "target": 2, "replicas": [replica]}
    return {"models": [model], "routers": [{"id": "r1", "state": "RUNNING"}]}


def counted(values: dict[str, int], at: float) -> dict[str, RouterPart]:
    """A router that has counted so much for each tenant, and for all of them together."""
    counts = {(model, tenant): (value, 10 * value) for model in MODELS for tenant, value in values.items()}
    total = sum(values.values())
    counts |= {(model, None): (total, 10 * total) for model in MODELS}
    return {
        "r1": RouterPart(
            "r1", at, waiting={"chat": total}, running={"chat": 1}, slots={"e1": (total, 8)}, counts=counts
        )
    }


def found(
    of_tenants: dict[str, dict[str, Any]], named: str, *, message: str = "", why: str = "", used: int = 0, free: int = 0
) -> Found:
    """A state: of each tenant `waits`, `sessions`, `batches` and `ended`. `named`: who watches."""
    rows = []
    for model in MODELS:
        here = [
            Wait(request_class, tenant, waited_s, reason)
            for tenant, one in of_tenants.items()
            for of_model, request_class, waited_s, reason in one["waits"]
            if of_model == model
        ]
        rows += waiting_rows(model, here, (named,))
    sessions = [
        session(tenant, n, used=one["ended"]) for tenant, one in of_tenants.items() for n in range(one["sessions"])
    ]
    batches = [
        batch(tenant, n, completed=one["ended"]) for tenant, one in of_tenants.items() for n in range(one["batches"])
    ]
    ended = {tenant: one["ended"] for tenant, one in of_tenants.items()}
    before = counted(dict.fromkeys(ended, 0), 0.0)
    now = counted(ended, 2.0)
    return Found(
        "2027-01-31T00:00:00Z",
        {name: LiveModel(100) for name in MODELS},
        state(message, why),
        {"n1": "10.0.0.1"},
        QuotaPart(figures(used, free), tuple(rows), {"chat": len(rows)}, tuple(sessions)),
        now,
        rates(before, now),
        [(one, "2027-01-31T00:00:00Z", None) for one in batches],
        ("router r2",),
    )


of_tenant = st.fixed_dictionaries(
    {"waits": waits, "sessions": st.integers(0, 3), "batches": st.integers(0, 3), "ended": st.integers(0, 50)}
)
others = st.fixed_dictionaries(
    {
        "tenants": st.dictionaries(st.sampled_from(OTHERS), of_tenant),
        "message": st.sampled_from(["", "engine-chat: rival-1 waits"]),
        "why": st.sampled_from(["", "7 ongoing requests of rival-2"]),
        "used": amounts,
        "free": amounts,
    }
)
