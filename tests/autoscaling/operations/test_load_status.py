"""What `serve-app status` says of load and scaling, from the numbers Serve's controller has."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from autoscaling.operations.status import FIXED, describe_load
from serve_app.cli import instances
from serve_app.names import ROUTER

SCALE = {
    "min_replicas": 0,
    "max_replicas": 8,
    "target_ongoing_requests": 20.0,
    "look_back_period_s": 5.0,
    "upscale_delay_s": 30.0,
    "downscale_delay_s": 120.0,
    "downscale_to_zero_delay_s": 600.0,
}


@dataclass(frozen=True)
class Point:
    timestamp: float
    value: float


def engine(running: int, target: int, scale: dict[str, Any] | None = SCALE) -> dict[str, Any]:
    return {
        "name": "engine-org--m",
        "target_num_replicas": target,
        "replicas": [{"state": "RUNNING"}] * running + [{"state": "STARTING", "node_id": "n"}] * (target - running),
        "deployment_config": {"autoscaling_config": scale},
    }


def reported_load(*routers: tuple[int, int], engines: tuple[int, ...] = ()) -> dict[str, Any]:
    """Waiting and granted of each router, what each engine runs; older samples say something else."""
    old = Point(1.0, 99.0)
    return {
        ROUTER: {
            "waiting_org/m": [[old, Point(2.0, waiting)] for waiting, _ in routers],
            "granted_org/m": [[old, Point(2.0, granted)] for _, granted in routers],
            "waiting_other": [[old]] * len(routers),
            "granted_other": [[old]] * len(routers),
        },
        "engine-org--m": {"ongoing": [[old, Point(2.0, count)] for count in engines]},
    }


def test_the_newest_numbers_of_all_routers_are_summed() -> None:
    seen = describe_load(engine(2, 2), reported_load((3, 10), (1, 12), engines=(11, 11)))
    assert (seen["ongoing"], seen["waiting"]) == (22, 4)
    assert "26.0 requests, 4 of them waiting now, at 20 a replica: 2 wanted" in seen["why"]


def test_a_request_that_has_just_been_granted_is_counted_once() -> None:
    """The engine has it already, the router's newest sample still has it waiting."""
    seen = describe_load(engine(1, 1), reported_load((1, 6), engines=(7,)))
    assert (seen["ongoing"], seen["waiting"]) == (6, 1)
    leaving = describe_load(engine(1, 1), reported_load((0, 2), engines=(7,)))  # five of them are a leaving router's
    assert (leaving["ongoing"], leaving["waiting"]) == (7, 0)


@pytest.mark.parametrize(
    ("running", "target", "load", "words"),
    [
        (1, 1, 61, "4 wanted; up after 30 s of that"),
        (3, 3, 25, "2 wanted; down after 120 s of that"),
        (1, 1, 0, "0 wanted; down after 600 s of that"),
        (0, 0, 0, "nothing waits"),
        (0, 1, 0, "the first replica starts"),
        (8, 8, 500, "max_replicas is 8"),
    ],
)
def test_why_names_the_load_and_the_delay(running: int, target: int, load: int, words: str) -> None:
    assert words in describe_load(engine(running, target), reported_load((0, load)))["why"]


def test_why_says_how_many_rows_of_batches_do_not_count() -> None:
    reported = reported_load((3, 64), engines=(4,))
    reported[ROUTER]["rows_org/m"] = [[Point(2.0, 63)]]
    seen = describe_load(engine(1, 1), reported)
    assert (seen["ongoing"], seen["waiting"]) == (64, 3)
    assert seen["why"] == "4.0 requests and 63 rows of batches, 3 of them waiting now, at 20 a replica: 1 wanted"


def test_a_start_without_a_place_is_not_reported_to_be_kept() -> None:
    placed = engine(1, 2)
    assert describe_load(placed, reported_load((0, 0)))["why"].endswith(
        "kept, for 120 s at most, while a part of it starts"
    )
    placed["replicas"][1]["node_id"] = None
    assert describe_load(placed, reported_load((0, 0)))["why"].endswith("0 wanted; down after 120 s of that")
    assert describe_load(placed, reported_load((0, 25)))["why"].endswith("2 wanted")


def test_a_fixed_number_is_reported_to_be_fixed_and_still_counted() -> None:
    fixed = engine(1, 1, None)
    assert describe_load(fixed, reported_load((2, 5))) == {"ongoing": 5, "waiting": 2, "why": FIXED}
    assert describe_load(fixed, {}) == {"ongoing": None, "waiting": None, "why": FIXED}
    assert describe_load(engine(1, 1, SCALE | {"min_replicas": 8}), {})["why"] == FIXED


def test_numbers_that_nobody_reported_are_a_dash_in_the_table() -> None:
    model = {"name": "m", "deployment": "engine-m", "state": "healthy", "message": "", "replicas": [], "target": 2}
    models = [
        model | {"ongoing": None, "waiting": None, "why": FIXED},
        model | {"name": "n", "ongoing": 7, "waiting": 0, "why": "because"},
    ]
    text = io.StringIO()
    found = {"instance": "i", "state": "running", "url": "u", "message": "", "models": models, "routers": []}
    instances.show(found | {"api_key_file": None}, Console(file=text, width=140))
    lines = [line.split("\t") for line in text.getvalue().splitlines()]
    assert ["model", "m", "engine-m", "healthy", "0/2", "-", "-", "-"] in lines
    assert ["model", "n", "engine-m", "healthy", "0/2", "7", "0", "because"] in lines
