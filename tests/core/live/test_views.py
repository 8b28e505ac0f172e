"""What a console shows: everything to operators, to a tenant its own part and nothing else, and no more than fits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.live import Found, LiveModel, QuotaPart, RouterPart, Wait, operator_view, tenant_view, waiting_rows
from serve_app.core.live.parts import TENANTS_NAMED
from tests.core.live.worlds import GB, MODELS, OTHERS, batch, figures, found, of_tenant, others, session, state

ACME = "acme"
QUIET: dict[str, Any] = {"waits": [], "sessions": 0, "batches": 0, "ended": 0}
MAX_BYTES = 100_000  # of an object each two seconds


def with_others(own: dict[str, Any], rest: dict[str, Any]) -> Found:
    more = {name: rest[name] for name in ("message", "why", "used", "free")}
    return found({ACME: own} | rest["tenants"], ACME, **more)


@given(of_tenant, others, others, st.sampled_from([None, frozenset({"chat"}), frozenset(MODELS)]))
def test_a_tenant_s_view_is_the_same_whatever_others_do(
    own: dict[str, Any], rest: dict[str, Any], other_rest: dict[str, Any], usable: frozenset[str] | None
) -> None:
    first, second = (tenant_view(with_others(own, one), ACME, usable) for one in (rest, other_rest))
    assert first == second


@given(of_tenant, others)
def test_a_tenant_s_view_names_no_other_tenant_no_node_and_no_router(own: dict[str, Any], rest: dict[str, Any]) -> None:
    text = json.dumps(tenant_view(with_others(own, rest), ACME, None))
    assert not [name for name in (*OTHERS, "n1", "10.0.0.1", "r1", "r2") if f'"{name}' in text or f" {name}" in text]
    assert "rival" not in text


@given(of_tenant, others)
def test_a_tenant_s_view_has_all_of_its_own(own: dict[str, Any], rest: dict[str, Any]) -> None:
    view = tenant_view(with_others(own, rest), ACME, None)
    assert sum(queue["waiting"] for model in view["models"] for queue in model["queues"]) == len(own["waits"])
    assert (len(view["memory"]["sessions"]), len(view["batches"])) == (own["sessions"], own["batches"])
    assert {model["requests_per_s"] for model in view["models"]} == {own["ended"] / 2.0}


@given(of_tenant)
def test_models_that_a_key_may_not_use_are_not_in_its_view(own: dict[str, Any]) -> None:
    view = tenant_view(found({ACME: own}, ACME), ACME, frozenset({"code"}))
    assert [model["model"] for model in view["models"]] == ["code"]
    assert {one["model"] for one in view["memory"]["sessions"]} <= {"code"}
    assert "chat" not in json.dumps(view)


def test_a_tenant_that_is_called_as_the_sum_of_the_others_sees_its_own_part_alone() -> None:
    waits = [Wait("high", f"t{number}", 1.0, "slots") for number in range(200) for _ in range(2)]
    quota = QuotaPart(figures(), waiting_rows("chat", waits), {"chat": len(waits)})
    view = tenant_view(Found("now", {"chat": LiveModel(10)}, quota=quota), "(other)", None)
    assert view["models"][0]["queues"] == []


@given(of_tenant, others)
def test_an_operator_s_view_has_every_waiting_request(own: dict[str, Any], rest: dict[str, Any]) -> None:
    everyone = {ACME: own} | rest["tenants"]
    view = operator_view(with_others(own, rest))
    queues = [queue for model in view["models"] for queue in model["queues"]]
    assert sum(queue["waiting"] for queue in queues) == sum(len(one["waits"]) for one in everyone.values())
    assert all(sum(queue["reasons"].values()) == queue["waiting"] for queue in queues)


def test_of_a_thousand_waiting_tenants_the_largest_are_named_and_the_others_are_one_row() -> None:
    waits = [Wait("high", f"t{number}", float(number), "slots") for number in range(1000) for _ in range(1 + number)]
    quota = QuotaPart(figures(), waiting_rows("chat", waits, ("t0",)), {"chat": len(waits)})
    view = operator_view(Found("now", {"chat": LiveModel(10**6)}, quota=quota))
    queues = view["models"][0]["queues"]
    largest = {f"t{number}" for number in range(1000 - TENANTS_NAMED, 1000)}
    assert {queue["tenant"] for queue in queues} == largest | {"(other)"}
    assert sum(queue["waiting"] for queue in queues) == len(waits)
    own = tenant_view(Found("now", {"chat": LiveModel(10**6)}, quota=quota), "t0", None)
    assert own["models"][0]["queues"][0]["waiting"] == 1, "however few wait of a tenant that watches"


def test_an_operator_sees_what_a_second_policy_advises_and_a_tenant_does_not() -> None:
    known = state(why="2 wanted")
    known["models"][0] |= {"advised": 4, "advice": "too many would start too late"}
    found = Found("now", {"chat": LiveModel(10)}, known, quota=QuotaPart(figures(), (), {}))
    assert operator_view(found)["models"][0]["why"] == "2 wanted; 4 advised: too many would start too late"
    assert tenant_view(found, ACME, None)["models"][0]["why"] == ""


def test_a_large_deployment_fits_into_what_is_sent_and_says_what_was_left_off() -> None:
    names = [f"model-{number}" for number in range(40)]
    rows = tuple(
        row
        for name in names
        for row in waiting_rows(name, [Wait("high", f"tenant-{n}", 1.0, "kv_tokens") for n in range(300)])
    )
    replicas = [{"id": f"r{n:08d}", "state": "RUNNING", "node": "n" * 56, "address": "10.0.0.1"} for n in range(20)]
    models = [
        {"name": name, "state": "healthy", "message": "m" * 5000, "why": "w" * 5000, "target": 20, "replicas": replicas}
        for name in names
    ]
    quota = QuotaPart(figures(), rows, {}, tuple(session(ACME, n) for n in range(1000)))
    batches = [(batch(ACME, n), "2027-01-31T00:00:00Z", "2027-02-01T00:00:00Z") for n in range(1000)]
    everything = {name: LiveModel(1000) for name in names}
    view = operator_view(Found("now", everything, {"models": models}, quota=quota, batches=batches))
    left_off = {"queues": 40 * 51 - 400, "replicas": 500, "sessions": 800, "batches": 950, "leases": 402}
    assert view["left_off"] == left_off
    assert len(json.dumps(view, separators=(",", ":"))) < 3 * MAX_BYTES, "which is sent every six seconds then"


def test_a_device_s_leases_add_up_to_what_is_granted() -> None:
    """What sessions hold is a part of their engine's memory, and is not counted twice."""
    quota = QuotaPart(figures(), (), {}, (session(ACME, 0), session(ACME, 2)))
    device = operator_view(Found("now", {}, quota=quota))["memory"]["devices"][0]
    assert [(one["kind"], one["bytes"]) for one in device["leases"]] == [
        ("engine", 38 * GB),
        ("reservation", 5 * GB),
        ("session", GB),
        ("session", GB),
    ]
    assert device["leases"][0] == {
        "owner": "e1",
        "model": "chat",
        "kind": "engine",
        "state": "running",
        "bytes": 38 * GB,
    }


def test_an_engine_that_waits_for_memory_says_how_much_and_why() -> None:
    memory = operator_view(Found("now", {}, quota=QuotaPart(figures())))["memory"]
    assert memory["waiting"] == [{"owner": "e9", "model": "code", "bytes": 120 * GB, "reason": "too little is free"}]
    assert memory["fragmentation"] == 0.25


def test_without_the_quota_actor_the_routers_say_who_waits_and_what_runs() -> None:
    rows = waiting_rows("chat", [Wait("high", ACME, 2.0, "quota_actor")])
    routers = {
        name: RouterPart(name, 1.0, waiting={"chat": 1}, slots={"e1": (used, 8)}, rows=rows, ejected=ejected)
        for name, used, ejected in (("r1", 2, ()), ("r2", 3, ("e1",)))
    }
    here = Found("now", {"chat": LiveModel(10)}, state(), routers=routers, missing=("quota_actor",))
    model = operator_view(here)["models"][0]
    assert model["queues"] == [
        {"class": "high", "tenant": ACME, "waiting": 2, "oldest_s": 2.0, "reasons": {"quota_actor": 2}}
    ]
    replica = model["replicas"][0]
    assert (replica["slots_used"], replica["slots_total"], replica["ejected"]) == (5, 8, True)
    assert (model["waiting"], model["running"], model["wanted"]) == (2, 1, 2)


def test_without_serve_s_controller_the_quota_actor_says_which_replicas_there_are() -> None:
    here = Found("now", {"chat": LiveModel(10, scales_to_zero=True)}, quota=QuotaPart(figures(used=500)))
    model = operator_view(here)["models"][0]
    assert (model["state"], model["wanted"], model["cold"]) == ("unknown", None, True)
    assert (model["replicas"][0]["state"], model["replicas"][0]["kv_used"]) == ("RUNNING", 500)
    running = replace(here, routers={"r1": RouterPart("r1", 1.0, running={"chat": 1})})
    assert not operator_view(running)["models"][0]["cold"]


def test_of_a_replica_s_use_the_routers_know_the_newest_and_without_one_of_them_the_larger_counts() -> None:
    parts = {name: RouterPart(name, 1.0, slots={"e1": (2, 8)}, kv_used={"e1": 100}) for name in ("r1", "r2")}
    here = Found("now", {"chat": LiveModel(10)}, state(), quota=QuotaPart(figures(used=500)), routers=parts)
    whole, lacking = (
        operator_view(one)["models"][0]["replicas"][0] for one in (here, replace(here, missing=("router r3",)))
    )
    assert (whole["slots_used"], whole["kv_used"]) == (4, 200)
    assert (lacking["slots_used"], lacking["kv_used"]) == (500 % 9, 500)


def test_a_replica_that_drains_is_shown_so_whoever_knows_it() -> None:
    drains = figures() | {"draining": ["e1"]}
    here = Found("now", {"chat": LiveModel(10)}, state(), quota=QuotaPart(drains))
    assert operator_view(here)["models"][0]["replicas"][0]["draining"]


def test_a_replica_that_runs_for_serve_and_reports_no_longer_is_silent_for_operators() -> None:
    ending = figures()
    ending["engines"][0]["state"] = "ending"
    here = Found("now", {"chat": LiveModel(10)}, state(), quota=QuotaPart(ending))
    assert operator_view(here)["models"][0]["replicas"][0]["silent"]
    assert not tenant_view(here, ACME, None)["models"][0]["replicas"][0]["silent"]
    for quota in (figures(), ending | {"draining": ["e1"]}):
        ordinary = replace(here, quota=QuotaPart(quota))
        assert not operator_view(ordinary)["models"][0]["replicas"][0]["silent"]
    stopping = state()
    stopping["models"][0]["replicas"][0]["state"] = "STOPPING"
    assert not operator_view(replace(here, state=stopping))["models"][0]["replicas"][0]["silent"], "it ends in order"


def test_with_nothing_but_the_configuration_a_view_has_all_its_parts() -> None:
    for view in (
        operator_view(Found("now", {"chat": LiveModel(10)}, missing=("quota_actor", "controller", "store"))),
        tenant_view(Found("now", {"chat": LiveModel(10)}, missing=("router r1", "router r2")), ACME, None),
    ):
        assert view["models"][0] | {"reason": "", "why": ""} == {
            "model": "chat",
            "state": "unknown",
            "reason": "",
            "running": 0,
            "wanted": None,
            "why": "",
            "waiting": 0,
            "waiting_bound": 10,
            "cold": False,
            "queues": [],
            "replicas": [],
            "requests_per_s": None,
            "tokens_per_s": None,
        }
        assert view["memory"] == {"fragmentation": None, "devices": [], "sessions": [], "waiting": []}
        assert view["missing"] in (["quota_actor", "controller", "store"], ["router"])
