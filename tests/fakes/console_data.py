"""What a loaded system answers to the console, made up: three models on six GPUs, six replicas, several tenants and
batches, a day of history. The shapes are those of the routes; every figure follows from the time and a seed."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime
from typing import Any

GB = 1_000_000_000
MINUTE_S = 60
DAY_S = 86_400
SEED = 20_261_129
TENANTS = ("product", "search", "night", "research")
WEIGHTS = {"product": 5.0, "search": 2.0, "night": 3.0, "research": 0.6}
CLASSES = ("critical", "high", "normal", "low")
RATES = {"critical": 4, "high": 60, "normal": 140, "low": 45}  # requests a minute
FIRST_TOKEN_S = {"critical": 0.12, "high": 0.19, "normal": 0.65, "low": 4.2}
MODELS = ("chat-70b", "code-32b", "embed")
NAME = "chat"  # of a canary
ROUTE = {
    "targets": [{"model": "chat-70b", "weight": 90}, {"model": "chat-70b-next", "weight": 10}],
    "fallbacks": ["chat-70b"],
    "shadow": {"model": "code-32b", "share": 0.05},
}
OF_RECORDS = ("time", "router", "node", "key_id", "prefix_blocks")  # which a receipt has not
EVIL = "<img src=x onerror=\"document.title='owned'\">"  # a tenant may be called so

Json = dict[str, Any]


def iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def live(now: float, tenant: str | None = None) -> Json:
    """The object of `GET /console/live`; of a tenant its own part."""
    found: Json = {
        "time": iso(now),
        "scope": "all" if tenant is None else "tenant",
        "tenant": tenant,
        "name": "platform-operator" if tenant is None else f"{tenant}-backend",
        "admin": tenant is None,
        "missing": [],
        "models": _models(now),
        "memory": _memory(),
        "routers": [{"name": f"r{number}", "state": "RUNNING"} for number in (1, 2, 3)],
        "batches": _live_batches(now),
    }
    return found if tenant is None else _own(found, tenant)


def _own(found: Json, tenant: str) -> Json:
    for model in found["models"]:
        model["queues"] = [queue for queue in model["queues"] if queue["tenant"] == tenant]
        model["waiting"] = sum(queue["waiting"] for queue in model["queues"])
        for replica in model["replicas"]:
            replica |= dict.fromkeys(("node", "address", "slots_used", "kv_used"))
    sessions = [session for session in found["memory"]["sessions"] if session["tenant"] == tenant]
    found["memory"] = {"sessions": sessions}
    found["batches"] = [batch for batch in found["batches"] if batch["tenant"] == tenant]
    return {name: value for name, value in found.items() if name != "routers"}


def _models(now: float) -> list[Json]:
    wave = math.sin(now / 40)
    waiting = [
        _queue("high", "product", 3, 0.9, {"slots": 3}),
        _queue("normal", "product", 14, 6.8, {"slots": 9, "kv_tokens": 5}),
        _queue("normal", "search", 6, 4.1, {"slots": 6}),
        _queue("low", "night", 31 + round(4 * wave), 74.0 + now % 10, {"guard_slots": 24, "slots": 7}),
    ]
    chat = _model("chat-70b", waiting, 3, 4, rates=(3.4, 2310 + 90 * wave))
    chat["state"] = "upscaling"
    chat["reason"] = "1 replica waits since 140 s for 72.0 GB of GPU memory"
    chat["why"] = "31 requests wait at class low, 3 replicas answer 3.4 requests/s: 4 replicas wanted"
    chat["replicas"] = [
        _replica("x7k2m9qp", 1, 62, 0.91), _replica("b3n8d5wz", 1, 64, 0.99), _replica("q1t6v4ra", 2, 57, 0.83),
    ]  # fmt: skip
    code = _model("code-32b", [_queue("normal", "research", 2, 1.3, {"kv_tokens": 2})], 2, 2, rates=(1.1, 640.0))
    code["why"] = "2 replicas by min_replicas; the load needs 1"
    code["replicas"] = [_replica("m4c9h2ts", 2, 21, 0.62), _replica("k8r3w7yd", 2, 9, 0.34) | {"draining": True}]
    embed = _model("embed", [], 1, 1, rates=(9.6, 5200.0))
    embed["replicas"] = [_replica("e2f5j8ln", 1, 11, 0.12)]
    embed["why"] = "1 replica is enough for 9.6 requests/s"
    return [chat, code, embed]


def _model(name: str, queues: list[Json], running: int, wanted: int, rates: tuple[float, float]) -> Json:
    return {
        "model": name, "state": "running", "reason": "", "running": running, "wanted": wanted, "why": "",
        "waiting": sum(queue["waiting"] for queue in queues), "waiting_bound": 256, "cold": False, "queues": queues,
        "replicas": [], "requests_per_s": rates[0], "tokens_per_s": rates[1],
    }  # fmt: skip


def _queue(request_class: str, tenant: str, waiting: int, oldest_s: float, reasons: dict[str, int]) -> Json:
    return {"class": request_class, "tenant": tenant, "waiting": waiting, "oldest_s": oldest_s, "reasons": reasons}


def _replica(name: str, node: int, slots: int, kv_part: float) -> Json:
    return {
        "replica": name, "node": f"node-{node}", "address": f"10.0.0.1{node}", "state": "RUNNING", "slots_used": slots,
        "slots_total": 64, "kv_used": round(180_000 * kv_part), "kv_total": 180_000,
        "draining": False, "ejected": False, "silent": False,
    }  # fmt: skip


def _memory() -> Json:
    leases = {
        (1, 0): [("x7k2m9qp", "chat-70b", "engine", 72)],
        (1, 1): [("b3n8d5wz", "chat-70b", "engine", 72)],
        (1, 2): [("e2f5j8ln", "embed", "engine", 14)],
        (2, 0): [("q1t6v4ra", "chat-70b", "engine", 72)],
        (2, 1): [("m4c9h2ts", "code-32b", "engine", 38)],
        (2, 2): [("k8r3w7yd", "code-32b", "engine", 38), ("chat-70b#4", "chat-70b", "reservation", 9)],
    }
    devices = [
        {
            "node": f"node-{node}", "address": f"10.0.0.1{node}", "device": device, "total_bytes": 80 * GB,
            "free_bytes": (76 - sum(lease[3] for lease in held)) * GB,
            "leases": [
                {"owner": owner, "model": model, "kind": kind, "bytes": size * GB,
                 "state": "starting" if kind == "reservation" else "running"}
                for owner, model, kind, size in held
            ],
        }
        for (node, device), held in leases.items()
    ]  # fmt: skip
    devices[4]["leases"].append(
        {"owner": "agent-triage", "model": "code-32b", "kind": "session", "state": "running", "bytes": 6 * GB}
    )
    devices[4]["free_bytes"] -= 6 * GB
    session = {
        "session_id": "agent-triage", "tenant": "research", "model": "code-32b", "replica": "m4c9h2ts",
        "kv_tokens": 32_768, "used": 21_040,
    }  # fmt: skip
    blocked = {
        "owner": "w9p4z6xu", "model": "chat-70b", "bytes": 72 * GB,
        "reason": "at least 72.0 GB needed on one device, 62.0 GB free",
    }  # fmt: skip
    return {"fragmentation": 0.41, "devices": devices, "sessions": [session], "waiting": [blocked]}


def _live_batches(now: float) -> list[Json]:
    rows = [
        ("batch_7d21f0a4", "night", "in_progress", 120_000, 78_410, 12, 5.2),
        ("batch_19be44c0", "platform", "in_progress", 4_000, 610, 0, 0.4),
        ("batch_c03a9e55", "search", "validating", 0, 0, 0, 0.01),
        ("batch_5f88d1b2", "night", "completed", 80_000, 79_991, 9, 29.0),
    ]
    return [
        {
            "id": name, "tenant": tenant, "status": status, "total": total, "completed": completed, "failed": failed,
            "created_at": now - hours * 3600, "expires_at": now + (24 - hours) * 3600,
        }
        for name, tenant, status, total, completed, failed, hours in rows
    ]  # fmt: skip


def own_batches(now: float, tenant: str) -> list[Json]:
    """`GET /v1/batches` of a tenant."""
    return [
        {
            "id": batch["id"], "object": "batch", "endpoint": "/v1/chat/completions", "errors": None,
            "status": batch["status"], "created_at": round(batch["created_at"]),
            "expires_at": round(batch["expires_at"]),
            "request_counts": {name: batch[name] for name in ("total", "completed", "failed")},
        }
        for batch in _live_batches(now) if batch["tenant"] == tenant
    ]  # fmt: skip


def history(now: float, since: float, step_s: int, by: str, tenant: str | None = None) -> list[Json]:
    """The rows of `GET /admin/history`: a day with a quiet night, a busy noon, and an overload in the last hour."""
    first = math.ceil(max(since, now - DAY_S) / step_s) * step_s
    return [
        _step(time_s, step_s, by, name, now) for time_s in range(first, int(now), step_s) for name in _names(by, tenant)
    ]


def _names(by: str, tenant: str | None) -> tuple[str, ...]:
    tenants = TENANTS if tenant is None else (tenant,)
    return {"class": CLASSES, "model": MODELS, "tenant": tenants, "name": (NAME, *MODELS)}.get(by, ("total",))


def history_of_name(now: float) -> list[Json]:
    """The rows of `GET /admin/history?name=chat&by=model&step_s=all`."""
    counts = (("chat-70b", 904, 2, 3), ("chat-70b-next", 96, 1, 8))
    return [
        {"time": iso(now), "name": name, "arrivals": ended, "ok": ended - failed, "failed": failed, "left": left}
        for name, ended, failed, left in counts
    ]


def _step(time_s: int, step_s: int, by: str, name: str, now: float) -> Json:
    noise = random.Random(f"{SEED}/{time_s}/{by}/{name}")
    day = 0.55 + 0.45 * math.sin((time_s - now) / DAY_S * 2 * math.pi + 1.2)
    overload = max(0.0, 1.0 - abs(now - 1300 - time_s) / 1400)
    minutes = step_s / MINUTE_S
    rate = RATES.get(name, 250 if by == "total" else 20 * WEIGHTS.get(name, 4.0))
    arrivals = round(rate * minutes * (day + 0.6 * overload) * noise.uniform(0.85, 1.15))
    refused = round(arrivals * 0.06 * overload) if name in ("low", "night", "total", "chat-70b") else 0
    first_s = FIRST_TOKEN_S.get(name, 0.7) * (1 + (4 if name in ("normal", "low") else 0.5) * overload)
    first_s *= noise.uniform(0.85, 1.2)
    waited = arrivals * first_s * 0.4
    return {
        "time": iso(time_s), "name": name, "arrivals": arrivals, "ok": arrivals - refused, "refused": refused,
        "failed": 1 if noise.random() < 0.004 else 0, "cancelled": 0, "bad_request": 0, "left": 0,
        "prompt_tokens": arrivals * 700, "output_tokens": arrivals * 210,
        "waiting_max": round(60 * overload * rate / 250),
        "first_token_p50_s": round(first_s * 0.6, 4), "first_token_p95_s": round(first_s * 1.9, 4),
        "request_p50_s": round(first_s + 5, 3), "request_p95_s": round(first_s * 2 + 14, 3),
        "wait_p95_s": round(first_s * 1.4, 4),
        "waits": {"slots": round(waited * 0.5, 2), "kv_tokens": round(waited * 0.2 * overload, 2),
                  "guard_slots": round(waited * overload, 2), "turn": round(waited * 0.1, 2)},
    }  # fmt: skip


def events(now: float) -> list[Json]:
    """The rows of `GET /admin/events`, the newest first."""
    rows = [
        (140, "scaling", "chat-70b", "warning",
         "chat-70b: 1 replica waits for 72.0 GB of GPU memory; 62.0 GB free on one device", {"replica": "w9p4z6xu"}),
        (180, "scaling", "chat-70b", "info",
         "Deployment chat-70b changed its target from 3 to 4 replicas: 31 requests wait at class low for over 60 s",
         {"from": 3, "to": 4}),
        (340, "health", "k8r3w7yd", "warning",
         "Replica k8r3w7yd of code-32b drains: asked by key platform-operator", {}),
        (512, "health", "router r2", "warning",
         "Router r2 ejected replica b3n8d5wz for 2 s: its connection was lost", {"replica": "b3n8d5wz", "for_s": 2}),
        (515, "health", "b3n8d5wz", "error",
         "The engine of replica b3n8d5wz died under 2 requests: CUDA error: an illegal memory access was encountered",
         {"requests": 2}),
        (3900, "scaling", "code-32b", "info",
         "Deployment code-32b changed its target from 3 to 2 replicas: 1.1 requests/s need 1 replica, for 300 s",
         {"from": 3, "to": 2}),
        (15_200, "scaling", "embed", "info",
         "Deployment embed changed its target from 0 to 1 replicas: a request waits", {"from": 0, "to": 1}),
    ]  # fmt: skip
    return [
        {"time": iso(now - ago_s), "kind": kind, "subject": subject, "level": level,
         "message": message, "details": details}
        for ago_s, kind, subject, level, message, details in rows
    ]  # fmt: skip


def records(now: float) -> list[Json]:
    """Requests that have ended, the newest first: two failed minutes ago, one waited for long, one was refused."""
    noise = random.Random(SEED)
    found = [_record(now, number, noise) for number in range(60)]
    lost = {
        "outcome": "engine_failed",
        "losses": 2,
        "first_token_s": None,
        "replica_id": "b3n8d5wz",
        "output_tokens": 0,
    }
    for number, ago_s in ((4, 512), (5, 515)):
        found[number] |= lost | {"time": iso(now - ago_s), "total_s": 31.0}
    found[7] |= {
        "request_class": "low", "tenant": "night", "wait_s": 74.2, "first_token_s": 74.9, "total_s": 82.3,
        "waited_for": {"guard_slots": 61.0, "slots": 12.9}, "request_id": "slow0000000000000000000000000001",
        "story": [
            "slow0000000000000000000000000001: low request of night to chat-70b, answered after 82.3 s.",
            "Waited 74.2 s: 23 requests of class high and 31 requests of class low were ahead; the free slots were kept"
            " for higher classes.",
            "Ran on q1t6v4ra, where most was free; first token after 74.9 s, then 41 ms a token.",
        ],
    }  # fmt: skip
    found[9] |= {
        "outcome": "refused",
        "refused": "queue_full",
        "retry_after_s": 16.0,
        "replica_id": None,
        "first_token_s": None,
    }
    found[9] |= {"granted": False, "total_s": 0.02, "wait_s": 0.02, "waited_for": {}}
    found[3] |= {"model": "chat-70b-next", "asked_model": NAME, "hops": [["chat-70b", "queue_full"]]}
    found[10] |= {"tenant": EVIL, "model": "chat-70b"}
    return sorted(found, key=lambda record: str(record["time"]), reverse=True)


def _record(now: float, number: int, noise: random.Random) -> Json:
    wait_s = round(noise.expovariate(1.2), 3)
    first_s = round(wait_s + noise.uniform(0.1, 0.5), 3)
    tokens = noise.randint(20, 600)
    return {
        "request_id": f"{noise.getrandbits(128):032x}", "time": iso(now - number * 4.7 - 3), "outcome": "ok",
        "client_id": f"job-{number}" if number % 5 == 0 else None, "request_class": noise.choice(CLASSES[1:]),
        "tenant": noise.choice(TENANTS), "model": noise.choice(MODELS[:2]), "wait_s": wait_s, "first_token_s": first_s,
        "total_s": round(first_s + tokens * 0.031, 3), "granted": True, "prompt_tokens": noise.randint(50, 3000),
        "output_tokens": tokens, "refused": None, "retry_after_s": None, "limit_wait_s": 0.0,
        "waited_for": {"slots": wait_s}, "replica_id": noise.choice(("x7k2m9qp", "b3n8d5wz", "q1t6v4ra")),
        "route": "home", "losses": 0, "preempted": 0, "moved": 0, "continued": [], "not_continued": None,
        "ahead": {"high": 2},
        "estimated_prompt": 400, "estimated_output": 240, "source": "tenant", "itl_s": 0.031, "longest_gap_s": 0.21,
        "slo": "met", "trace_id": None, "router": f"r{number % 3 + 1}", "node": "node-1", "key_id": "key_product",
        "asked_model": None, "hops": [], "prefix_blocks": [],
        "story": [f"Waited {wait_s:.1f} s; no replica had enough free slots."],
    }  # fmt: skip


def waiting(now: float) -> list[Json]:
    """`GET /admin/requests?waiting=1`."""
    rows = [
        ("night", "low", 74.0, "guard_slots"),
        ("product", "normal", 6.8, "slots"),
        ("product", "normal", 5.1, "kv_tokens"),
    ]
    return [
        {"request_id": f"wait{number:028d}", "time": iso(now - wait_s), "outcome": None, "tenant": tenant,
         "wait_s": wait_s,
         "request_class": request_class, "model": "chat-70b", "asked_model": None, "waits_for": reason,
         "router": "r1", "node": "node-1"}
        for number, (tenant, request_class, wait_s, reason) in enumerate(rows)
    ]  # fmt: skip


def usage(by: str, tenant: str | None = None) -> list[Json]:
    """The sums of `GET /admin/usage`."""
    days = tuple(datetime.fromtimestamp(number * DAY_S, UTC).date().isoformat() for number in (20_782, 20_783, 20_784))
    names = {"tenant": TENANTS, "model": MODELS, "key": ("key_product", "key_search", "key_night"), "day": days,
             "name,model": (f"{NAME}/chat-70b", f"{NAME}/chat-70b-next", "embed/embed")}[by]  # fmt: skip
    if by == "tenant" and tenant is not None:
        names = (tenant,)
    scale = 1 if tenant is None else 0.2
    return [
        {**dict(zip(by.split(","), name.split("/"), strict=True)), "requests": round(9_000 * scale / (place + 1)),
         "prompt_tokens": round(6_400_000 * scale / (place + 1)),
         "cached_tokens": round(2_100_000 * scale / (place + 1)),
         "output_tokens": round(1_900_000 * scale / (place + 1)),
         "kv_token_ms": 10**9, "wait_ms": round(5_400_000 * scale / (place + 1)), "cost_micro": 0, "unsettled": 0}
        for place, name in enumerate(names)
    ]  # fmt: skip


def keys(now: float) -> list[Json]:
    """`GET /admin/keys` at the start."""
    rows: list[tuple[str, str, Json]] = [
        ("platform-operator", "platform", {"admin": True, "source": "configuration", "max_class": "critical"}),
        ("product-backend", "product", {"limits": {"requests_per_minute": 600, "tokens_per_minute": 900_000}}),
        ("search-api", "search", {"models": ["chat-70b", "embed"], "previous_until": iso(now + 7200)}),
        ("night-batch", "night", {"max_class": "low", "limits": {"max_concurrent": 32}, "expires_at": iso(now + 9e6)}),
        ("old-laptop", "research", {"state": "revoked", "revoked_at": iso(now - 9e5)}),
        (EVIL, "research", {}),
    ]
    return [
        key_of(name, tenant, now) | changes | {"id": f"key_{number}"}
        for number, (name, tenant, changes) in enumerate(rows)
    ]


def key_of(name: str, tenant: str, now: float) -> Json:
    """A key as the routes show it."""
    return {
        "object": "api_key", "id": "key_new", "name": name, "tenant": tenant, "max_class": "high",
        "default_class": "normal", "admin": False, "metrics": False, "models": None, "expires_at": None, "limits": None,
        "batch_limits": None, "state": "active", "source": "store", "created_at": iso(now - 5e6), "revoked_at": None,
        "previous_until": None,
    }  # fmt: skip


def audit(now: float) -> list[Json]:
    """The entries of `GET /admin/audit`, the oldest first."""
    rows: list[tuple[int, str, str, str, Json]] = [
        (260_000, "deploy", "serve-app", "machine", {"digest_before": "a1" * 32, "digest_after": "b2" * 32}),
        (90_000, "key.create", "key_3", "key_0", {"details": {"tenant": "night"}}),
        (340, "drain", "k8r3w7yd", "key_0", {"details": {"is_node": False, "within_s": None}}),
    ]
    return [
        {"id": str(number), "time": iso(now - ago_s), "author": author, "tenant": "platform", "action": action,
         "target": target, "digest_before": None, "digest_after": None, "details": {}} | changes
        for number, (ago_s, action, target, author, changes) in enumerate(rows, 1)
    ]  # fmt: skip


def logs(now: float) -> list[Json]:
    """The lines of `GET /admin/logs`."""
    rows = [
        ("chat-70b", "b3n8d5wz",
         "ERROR 2026-11-29 engine.py:88 The engine died: CUDA error: an illegal memory access was encountered"),
        ("router", "r2",
         "WARNING 2026-11-29 replicas.py:61 Replica b3n8d5wz is ejected for 2 s: its connection was lost"),
        ("router", "r1", "INFO 2026-11-29 app.py:120 Key key_0 asks for /admin/drains"),
        ("controller", "", "INFO 2026-11-29 deployment_state.py:410 Deployment chat-70b: 3 to 4 replicas"),
    ]  # fmt: skip
    return [
        {"time": iso(now - 520 + 9 * number), "source": source, "replica": replica, "path": f"/logs/{source}.log",
         "line": text}
        for number, (source, replica, text) in enumerate(rows)
    ]  # fmt: skip


def defrag_plan() -> Json:
    """`GET /admin/defrag`."""
    return {
        "plan": {
            "waits": {"owner": "w9p4z6xu", "model": "chat-70b", "ranks": 1, "wanted_bytes": 72 * GB,
                      "least_bytes": 72 * GB, "waits_s": 140.0, "why": "at least 72.0 GB needed on one device"},
            "steps": [{"owner": "e2f5j8ln", "model": "embed", "source": ["node-1/2"], "target": ["node-2/1"],
                       "bytes_to_move": 14 * GB}],
        },
        "begun": False,
        "addresses": {"node-1": "10.0.0.11", "node-2": "10.0.0.12"},
    }  # fmt: skip
