"""Which target a key has: the parts of the weights, nothing moves by itself, and a change moves what it must."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.names import ModelRoute, ModelRoutes, Shadow, WeightedModel
from tests.effort import examples

SESSIONS = [f"people\0session\0{number}" for number in range(10_000)]
FEW = SESSIONS[:300]
SIGMAS = 4  # of a binomial count: a hash that is right is outside once in 16,000 choices of the sessions
weights = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100), min_size=2)


def route(parts: dict[str, float], *fallbacks: str, shadow: Shadow | None = None) -> ModelRoute:
    return ModelRoute("chat", tuple(WeightedModel(*part) for part in parts.items()), fallbacks, shadow)


def targets(parts: dict[str, float], keys: list[str] = FEW) -> dict[str, str]:
    return {key: route(parts).target(key) for key in keys}


@pytest.mark.parametrize("parts", [{"old": 90, "new": 10}, {"old": 99, "new": 1}, {"a": 1, "b": 1, "c": 2}])
def test_each_target_has_its_part_of_ten_thousand_sessions(parts: dict[str, float]) -> None:
    found = list(targets(parts, SESSIONS).values())
    for model, weight in parts.items():
        part = weight / sum(parts.values())
        expected = part * len(SESSIONS)
        assert abs(found.count(model) - expected) <= SIGMAS * math.sqrt(expected * (1 - part))


def test_two_routers_agree_and_the_order_of_the_targets_is_nothing() -> None:
    parts = {"old": 90.0, "new": 10.0}
    assert targets(parts) == targets(parts) == targets(dict(reversed(parts.items())))


@given(weights, st.data())
@settings(max_examples=examples(50))
def test_a_target_whose_weight_rises_only_takes_keys(parts: dict[str, float], data: st.DataObject) -> None:
    risen = data.draw(st.sampled_from(sorted(parts)))
    factor = data.draw(st.floats(1, 10))
    before = targets(parts)
    after = targets(parts | {risen: parts[risen] * factor})
    assert all(after[key] in (before[key], risen) for key in before)
    assert all(after[key] == risen for key in before if before[key] == risen)


@given(weights, st.data())
@settings(max_examples=examples(50))
def test_a_target_that_leaves_moves_its_own_keys_alone(parts: dict[str, float], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(parts)))
    before = targets(parts)
    left = {name: weight for name, weight in parts.items() if name != gone}
    assert {key: model for key, model in targets(left).items() if before[key] != gone} == {
        key: model for key, model in before.items() if model != gone
    }
    assert targets(left) == targets(left | {gone: 0.0})  # a weight of 0 is no part


@given(weights, st.floats(0.1, 10))
@settings(max_examples=examples(50))
def test_weights_that_all_grow_alike_move_nothing(parts: dict[str, float], factor: float) -> None:
    before = targets(parts)
    after = targets({name: weight * factor for name, weight in parts.items()})
    moved = sum(before[key] != after[key] for key in before)
    assert moved <= 1  # two scores within rounding


def test_fallbacks_follow_the_target_in_order_and_each_model_comes_once() -> None:
    alone = route({"old": 1}, "spare", "old", "last", "spare")
    assert alone.models("key") == ("old", "spare", "last")
    canary = route({"old": 90, "new": 10}, "old")
    assert {canary.models(key) for key in FEW} == {("old",), ("new", "old")}
    assert canary.all_models == ("old", "new")


def test_a_share_of_requests_has_a_shadow_and_it_is_not_that_of_a_target() -> None:
    shadowed = route({"old": 90, "new": 10}, shadow=Shadow("next", 0.1))
    found = [key for key in SESSIONS if shadowed.shadows(key)]
    assert abs(len(found) - 1000) <= SIGMAS * math.sqrt(900)
    of_new = sum(shadowed.target(key) == "new" for key in found)
    assert abs(of_new - 100) <= SIGMAS * math.sqrt(90)
    assert not any(route({"old": 1}).shadows(key) for key in FEW)
    assert all(route({"old": 1}, shadow=Shadow("next", 1.0)).shadows(key) for key in FEW)


def test_a_name_is_found_until_the_configuration_has_it_no_more() -> None:
    routes = ModelRoutes([route({"old": 1})])
    assert routes.find("chat") == route({"old": 1})
    assert routes.find("old") is None
    assert routes.find(["chat"]) is None
    routes.configure([])
    assert routes.find("chat") is None
