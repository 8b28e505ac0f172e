"""What an operator writes about the waiting line reaches it."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.core.queue import ClassBound, QueuePolicy, TenantPolicy
from serve_app.core.queue.policy import DEFAULT_MIN_SHARE
from serve_app.core.receipts import ServiceLevel
from serve_app.errors import ConfigError
from serve_app.settings import AdmissionSettings, parse
from serve_app.settings.settings import DEFAULT_TENANT_WEIGHT
from serve_app.types import RequestClass


def test_bounds_weights_and_shares_reach_the_queue() -> None:
    admission = parse(
        {
            "admission": {
                "max_queued": 7,
                "max_queued_tokens": 9000,
                "max_wait_s": 5,
                "no_replica_wait_s": 6,
                "classes": {"low": {"max_queued": 3}, "high": {"max_queued_tokens": 50}},
                "tenants": {"gold": {"weight": 3, "share": 0.5}, "plain": {}},
                "min_share": 0.1,
                "guard_slots_share": 0.4,
            }
        }
    ).admission
    assert admission.queue_policy() == QueuePolicy(
        7,
        5.0,
        6.0,
        max_queued_tokens=9000,
        classes={RequestClass.LOW: ClassBound(3, None), RequestClass.HIGH: ClassBound(None, 50)},
        tenants={"gold": TenantPolicy(3.0, 0.5), "plain": TenantPolicy()},
        min_share=0.1,
        guard_slots_share=0.4,
    )


def test_levels_are_those_of_the_classes_that_promise_something() -> None:
    classes = {"low": {"max_queued": 3}, "high": {"ttft_slo_s": 1, "itl_slo_s": 0.05}, "normal": {"ttft_slo_s": 4}}
    assert parse({"admission": {"classes": classes}}).admission.service_levels == {
        RequestClass.HIGH: ServiceLevel(1.0, 0.05),
        RequestClass.NORMAL: ServiceLevel(4.0, None),
    }
    assert AdmissionSettings().service_levels == {}


def test_defaults_are_those_of_the_queue() -> None:
    assert AdmissionSettings().queue_policy().tenants == {}
    assert AdmissionSettings().queue_policy().min_share == DEFAULT_MIN_SHARE
    assert TenantPolicy().weight == DEFAULT_TENANT_WEIGHT


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"tenants": {"a": {"weight": 0}}}, "admission.tenants.a.weight"),
        ({"tenants": {"a": {"weight": 1e16}}}, "admission.tenants.a.weight"),
        ({"tenants": {"a": {"share": 1.5}}}, "admission.tenants.a.share"),
        ({"tenants": {"a": {"quota": 1}}}, "admission.tenants.a.quota"),
        ({"tenants": {"a": {"share": 0.6}, "b": {"share": 0.5}}}, "admission"),
        ({"classes": {"urgent": {}}}, "admission.classes.urgent"),
        ({"classes": {"low": {"max_queued": -1}}}, "admission.classes.low.max_queued"),
        ({"classes": {"low": {"ttft_slo_s": 0}}}, "admission.classes.low.ttft_slo_s"),
        ({"classes": {"low": {"itl_slo_s": float("inf")}}}, "admission.classes.low.itl_slo_s"),
        ({"min_share": 0.4}, "admission.min_share"),
        ({"guard_slots_share": 0.6}, "admission.guard_slots_share"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_key(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({"admission": wrong})
    assert (refused.value.param or "").startswith(key)


def test_settings_under_their_old_names_are_read_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=r"admission\.trickle_share is called admission\.min_share now"):
        admission = parse({"admission": {"trickle_share": 0.1}}).admission
    assert admission.min_share == 0.1
    with pytest.warns(FutureWarning, match=r"admission\.guard_slots_share"):
        assert parse({"admission": {"headroom_share": 0.2}}).admission.guard_slots_share == 0.2


def test_an_old_name_beside_the_new_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="trickle_share: is called min_share now, and both are given"):
        parse({"admission": {"trickle_share": 0.1, "min_share": 0.1}})


def test_no_settings_that_parse_are_refused_by_the_queue() -> None:
    parse({"admission": {"min_share": 0.25, "tenants": {"a": {"share": 1}}}}).admission.queue_policy()
