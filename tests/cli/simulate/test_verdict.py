"""The recommendation: the cheapest arm that meets every level, or the closest with what binds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaling.simulator import Obstacle
from serve_app.cli.simulate import money, percent, recommendation
from serve_app.cli.simulate.figures import MissedRequests
from tests.cli.simulate.pictured import arm, class_of


def test_the_cheapest_of_the_arms_that_meet_every_level_is_taken() -> None:
    arms = [arm("dear", 9.0, 1.0, 1.0), arm("good", 3.45, 0.995, 0.99), arm("cheap", 1.0, 0.98, 1.0)]
    found = recommendation(arms, 0.99)
    assert found.arm == "good"
    assert found.text == (
        "Take good, the cheapest of 2 arms that meet every level: at most 2 GPUs, 1.7 in the mean "
        "(0.5 GPU hours, $3.45)."
    )


def test_of_arms_of_the_same_cost_that_with_fewer_gpu_hours_is_taken() -> None:
    arms = [arm("long", 0.0, 1.0, 1.0), arm("short", 0.0, 1.0, 1.0, gpu_hours=0.2)]
    assert recommendation(arms, 0.99).arm == "short"


def test_a_configuration_alone_is_no_arm() -> None:
    assert recommendation([arm("p", 1.0, 1.0, 1.0)], 0.99).text.startswith("This configuration meets every level: at")
    assert recommendation([arm("p", 1.0, 0.5, 1.0)], 0.99).text.startswith("This configuration does not give 99% of")


def test_without_a_fitting_arm_the_closest_is_named_with_what_binds() -> None:
    found = recommendation([arm("far", 1.0, 0.5, 1.0), arm("near", 9.0, 0.97, 0.98)], 0.99)
    assert found.arm is None
    assert "near comes closest: high has 97% within 2 s" in found.text
    assert "Of its 7 missed requests 5 waited while a replica of chat started, which takes 60 s" in found.text


@pytest.mark.parametrize(
    ("why", "advice"),
    [
        (Obstacle.MAX_REPLICAS, "try --what-if max_replicas=16"),
        (Obstacle.MAX_GPUS, "scaling.max_gpus kept chat from a further replica"),
        (Obstacle.GPUS, "give more with --gpus"),
        (Obstacle.LIMITS, "over the limits of their tenants at chat"),
        (Obstacle.DECISION, "try a higher min_replicas"),
        (Obstacle.ENGINE, "faster GPUs"),
        (Obstacle.FAILED, "lost their replicas of chat"),
        (Obstacle.STARTS, "a higher min_replicas"),
    ],
)
def test_whatever_binds_has_an_advice(why: Obstacle, advice: str) -> None:
    missed = (MissedRequests(why.value, "chat", 9),)
    classes = (replace(class_of("high", 0.5), missed=missed), class_of("normal", 1.0))
    found = recommendation([arm("a", 1.0, 0.5, 1.0, classes=classes)], 0.99)
    assert advice in found.text


def test_without_a_level_there_is_no_recommendation_and_the_option_is_named() -> None:
    classes = (class_of("high", 0.5, None), class_of("normal", 1.0, None))
    found = recommendation([arm("a", 1.0, 0.5, 1.0, classes=classes, meets=None)], 0.99)
    assert found.arm is None
    assert "give --level high=2s --level normal=2s" in found.text
    assert "The cheapest, a, takes at most 2 GPUs" in found.text


def test_a_percentage_is_never_rounded_up_and_a_free_profile_has_no_price() -> None:
    assert [percent(part) for part in (0.99999, 0.99, 1.0, 0.123456, None)] == ["99.99%", "99%", "100%", "12.34%", "-"]
    assert [money(cost) for cost in (0.0, 3.456, 1234.5)] == ["-", "$3.46", "$1,234"]


@pytest.mark.parametrize("why", [Obstacle.DECISION, Obstacle.ENGINE, Obstacle.STARTS])
def test_a_target_is_advised_only_where_the_policy_has_one(why: Obstacle) -> None:
    missed = (MissedRequests(why.value, "chat", 9),)
    classes = (replace(class_of("high", 0.5), missed=missed), class_of("normal", 1.0))
    texts = {
        policy: recommendation([replace(arm("a", 1.0, 0.5, 1.0, classes=classes), policy=policy)], 0.99).text
        for policy in ("ongoing", "slo")
    }
    assert ["target_ongoing_requests" in text for text in texts.values()] == [True, False]
