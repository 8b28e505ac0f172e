"""What a deploy would restart, and why."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.names import RELEASE
from serve_app.settings import Change, changes, parse

A = {"name": "a"}
B = {"name": "b"}


def planned(before: dict[str, Any] | None, after: dict[str, Any], release: str = RELEASE) -> dict[str, Change]:
    deployed = None if before is None else arguments(before, release)
    return {one.deployment: one for one in changes(deployed, arguments(after), on_cpu=True)}


def arguments(config: dict[str, Any], release: str = RELEASE) -> dict[str, Any]:
    return {"release": release, **parse(config).model_dump(mode="json")}


def whats(before: dict[str, Any] | None, after: dict[str, Any]) -> dict[str, str]:
    return {name: one.effect for name, one in planned(before, after).items()}


def test_where_nothing_is_deployed_all_is_added() -> None:
    assert whats(None, {"models": [A]}) == {"engine-a": "added", "Router": "added", "BatchWorker": "added"}


def test_a_change_of_one_model_restarts_it_alone_and_says_why() -> None:
    plan = planned({"models": [A, B]}, {"models": [A, B | {"max_num_seqs": 8, "kv_cache_gb": 1}]})
    assert {name: one.effect for name, one in plan.items()} == {
        "engine-a": "unchanged",
        "engine-b": "restarted",
        "Router": "changed",
        "BatchWorker": "changed",
    }
    assert plan["engine-b"].fields == ("kv_cache_gb: not set -> 1.0", "max_num_seqs: 64 -> 8")


def test_another_release_restarts_what_stays() -> None:
    plan = planned({"models": [A]}, {"models": [A, B]}, "0.1.0")
    assert {name: one.effect for name, one in plan.items()} == {
        "engine-a": "restarted",
        "engine-b": "added",
        "Router": "restarted",
        "BatchWorker": "restarted",
    }
    assert plan["Router"].why == f"serve-app {RELEASE} replaces 0.1.0"


def test_models_come_and_go_without_a_restart_of_others() -> None:
    assert whats({"models": [A]}, {"models": [A, B]})["engine-b"] == "added"
    assert whats({"models": [A, B]}, {"models": [A]}) == {
        "engine-a": "unchanged",
        "engine-b": "removed",
        "Router": "changed",
        "BatchWorker": "changed",
    }


def test_what_is_taken_over_restarts_nothing() -> None:
    live = {"replicas": {"max_replicas": 3}, "drain_s": 5}
    plan = planned({"models": [A]}, {"models": [A | live], "admission": {"max_queued": 3}})
    assert {name: one.effect for name, one in plan.items()} == dict.fromkeys(plan, "changed")
    assert plan["Router"].fields == ("admission.max_queued: 1000 -> 3",)


def test_of_a_group_that_was_not_set_only_what_is_set_is_shown() -> None:
    batching = {"preset": "dynamic-32", "max_size": 4}
    plan = planned({"models": [A]}, {"models": [A | {"batching": batching}]})
    assert plan["engine-a"].fields == (f"batching: not set -> {batching}",)


def test_a_default_that_is_written_out_is_reported_as_taken_over() -> None:
    assert whats({"models": [A]}, {"models": [A | {"max_num_seqs": 64}]})["engine-a"] == "unchanged"
    assert whats({"models": [A]}, {"models": [A | {"kv_cache_gb": 0.54, "gpus_per_rank": 0}]})["engine-a"] == "changed"


def test_cpus_of_routers_restart_them_and_the_quota_s_settings_come_later() -> None:
    plan = planned({"models": [A]}, {"models": [A], "router": {"cpus": 1}, "quota": {"reserved_gb": 3}})
    assert (plan["Router"].effect, plan["Router"].fields) == ("restarted", ("router.cpus: 0.0 -> 1.0",))
    assert (plan["GpuMemoryQuota"].effect, plan["GpuMemoryQuota"].fields) == (
        "later",
        ("quota.reserved_gb: 2.0 -> 3.0",),
    )


@pytest.mark.parametrize("release", [RELEASE, "0.1.0"])
def test_tls_is_not_called_taken_over_by_what_runs(release: str) -> None:
    tls = {"certificate": "c.pem", "key": "k.pem"}
    plan = planned({"models": [A], "http": {"tls": tls}}, {"models": [A]}, release)
    assert plan["HAProxy"].effect == "later"
    assert plan["HAProxy"].fields == (f"http.tls: {tls} -> not set",)
    assert plan["Router"].fields == ()


def test_changed_keys_are_named_without_their_digests() -> None:
    keys = [{"auth": {"keys": [{"key_sha256": digit * 64}]}, "models": [A]} for digit in "01"]
    assert planned(keys[0], keys[1])["Router"].fields == ("auth.keys",)


@pytest.mark.parametrize(
    ("deployed", "why"),
    [
        ({"models": [A | {"gone": 1}]}, "models.0.gone: unknown key"),
        ({"config": "file.yaml"}, "config: unknown key"),
        ("text", ""),
        ([1], ""),
    ],
    ids=["of another version", "of another tool", "text", "list"],
)
def test_where_what_is_deployed_cannot_be_read_all_counts_as_restarted(deployed: Any, why: str) -> None:
    found = changes(deployed, arguments({"models": [A]}), on_cpu=True)
    assert {one.deployment: one.effect for one in found} == dict.fromkeys(
        ("engine-a", "Router", "BatchWorker"), "restarted"
    )
    assert found[0].why.startswith("what is deployed cannot be read: ")
    assert why in found[0].why


def test_a_served_model_keeps_its_replicas_so_the_number_to_start_with_is_no_change() -> None:
    def replicas(initial: int | None) -> dict[str, Any]:
        return {"models": [A | {"replicas": {"min_replicas": 1, "initial_replicas": initial, "max_replicas": 4}}]}

    for before, after in ((4, 4), (None, 4), (2, None)):
        assert whats(replicas(before), replicas(after))["engine-a"] == "unchanged"


def test_workers_come_and_go_with_their_number_and_take_over_the_rest() -> None:
    def workers(number: int, **more: Any) -> dict[str, Any]:
        return {"models": [A], "batch": {"workers": number, **more}}

    assert whats(workers(0), workers(2))["BatchWorker"] == "added"
    assert whats(workers(1), workers(0))["BatchWorker"] == "removed"
    assert "BatchWorker" not in whats(workers(0), workers(0))
    assert whats(workers(1), workers(1))["BatchWorker"] == "unchanged"
    plan = planned(workers(1), workers(1, max_in_flight=8))
    assert (plan["BatchWorker"].effect, plan["BatchWorker"].fields) == ("changed", ("batch.max_in_flight: 512 -> 8",))


def test_prompts_in_logs_are_taken_over_by_routers_that_run() -> None:
    plan = planned({"models": [A]}, {"models": [A], "logs": {"prompts": True}})
    assert "logs" not in plan
    assert (plan["Router"].effect, plan["Router"].fields) == ("changed", ("logs.prompts: False -> True",))


def test_the_form_of_the_logs_is_taken_over_by_the_next_start() -> None:
    plan = planned({"models": [A]}, {"models": [A], "logs": {"format": "json"}})
    assert (plan["logs"].effect, plan["logs"].fields) == ("later", ("logs.format: text -> json",))
    assert plan["Router"].effect == "unchanged"
