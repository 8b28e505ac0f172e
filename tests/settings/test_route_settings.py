"""Names in the configuration: what stands behind each, and what is wrong with one."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.core.names import ModelRoute, Shadow, WeightedModel
from serve_app.errors import Forbidden
from serve_app.settings import changes, examine, parse, remote_settings

MODELS = [{"name": "old"}, {"name": "new"}, {"name": "next"}]
CANARY = {
    "name": "chat",
    "targets": [{"model": "old", "weight": 90}, {"model": "new", "weight": 10}],
    "fallbacks": ["old"],
    "shadow": {"model": "next", "share": 0.1},
}


def settings(*routes: Any, **more: Any) -> dict[str, Any]:
    return {"models": MODELS, "routes": list(routes), **more}


def weighed(old: float, new: float) -> dict[str, Any]:
    return CANARY | {"targets": [{"model": "old", "weight": old}, {"model": "new", "weight": new}]}


def test_a_name_has_targets_fallbacks_and_a_shadow_and_an_alias_has_one_target() -> None:
    canary, alias = parse(settings(CANARY, {"name": "gpt-4o", "targets": [{"model": "old"}]})).routes
    targets = WeightedModel("old", 90), WeightedModel("new", 10)
    assert canary.route() == ModelRoute("chat", targets, ("old",), Shadow("next", 0.1))
    assert alias.route() == ModelRoute("gpt-4o", (WeightedModel("old", 1.0),))


@pytest.mark.parametrize(
    ("wrong", "path", "words"),
    [
        ({"name": "old"}, "routes.0.name", "is the name of a model"),
        ({"targets": [{"model": "od"}]}, "routes.0.targets.0.model", "there is no model 'od'; did you mean old?"),
        ({"targets": [{"model": "chat"}]}, "routes.0.targets.0.model", "is this name itself"),
        ({"targets": [{"model": "other"}]}, "routes.0.targets.0.model", "is a name, too"),
        ({"fallbacks": ["new", "other"]}, "routes.0.fallbacks.1", "is a name, too"),
        ({"fallbacks": ["zzz"]}, "routes.0.fallbacks.0", "there are: old, new, next"),
        ({"fallbacks": ["new", "new"]}, "routes.0.fallbacks", "'new' is given twice"),
        ({"targets": [{"model": "old"}, {"model": "old"}]}, "routes.0.targets", "'old' is given twice"),
        ({"targets": [{"model": "old", "weight": 0}]}, "routes.0.targets", "their weights are 0 in sum"),
        ({"targets": []}, "routes.0.targets", ""),
        ({"shadow": {"model": "zzz", "share": 0.1}}, "routes.0.shadow.model", "there is no model 'zzz'"),
        ({"shadow": {"model": "next", "share": 0}}, "routes.0.shadow.share", ""),
        ({"shadow": {"model": "new", "share": 0.1}}, "routes.0.shadow.model", "runs requests of this name already"),
        ({"name": "other"}, "routes", "'other' is given twice"),
    ],
)
def test_a_mistake_in_a_name_has_its_place(wrong: dict[str, Any], path: str, words: str) -> None:
    other = {"name": "other", "targets": [{"model": "next"}]}
    found, mistakes = examine(settings(CANARY | wrong, other))
    assert found is None
    assert [mistake.path for mistake in mistakes] == [path]
    assert words in mistakes[0].message


def test_a_plan_shows_the_weight_that_changes_and_restarts_nothing() -> None:
    before, after = (parse(settings(route)).model_dump(mode="json") for route in (weighed(90, 10), weighed(80, 20)))
    plan = {change.deployment: change for change in changes(before, after, on_cpu=True)}
    assert {name for name, change in plan.items() if change.effect != "unchanged"} == {"Router", "BatchWorker"}
    assert plan["Router"].effect == "changed"
    assert plan["Router"].why == "taken over without a restart"
    fields = [field for field in plan["Router"].fields if field.startswith("routes")]
    assert fields == ["routes.chat.weights.new: 10.0 -> 20.0", "routes.chat.weights.old: 90.0 -> 80.0"]


def test_a_deploy_by_http_moves_weights_and_no_models_behind_a_name() -> None:
    running = parse(settings(CANARY))
    moved = remote_settings(running, settings(weighed(0, 100)), "research")
    assert moved.routes[0].route().targets == (WeightedModel("old", 0), WeightedModel("new", 100))
    assert remote_settings(running, {"models": MODELS}, "research").routes == running.routes
    plain: dict[str, Any] = {"shadow": None}
    moved_there = {"targets": [{"model": "next"}]} | plain
    for closed in (plain, moved_there, {"fallbacks": ["next"]} | plain, {"name": "mine"}):
        with pytest.raises(Forbidden) as refused:
            remote_settings(running, settings(CANARY | closed), "research")
        assert refused.value.param == "routes"
