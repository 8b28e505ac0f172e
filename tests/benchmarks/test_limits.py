"""What `benchmarks.limits` measures: windows, what stayed unused, broken promises, a world in virtual time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.limits.clients import Ask, Attempt, Shape
from benchmarks.limits.load import LOADS, STRESSES, Load, figures
from benchmarks.limits.main import BARS, configuration, options_of, result_of
from benchmarks.limits.virtual import run
from benchmarks.limits.windows import Bucket, Charge, most_at_once, over_share, unused_share
from serve_app.settings import parse

BUCKET = Bucket(10.0, 60.0)  # one a second


def charges(*at: float, lasts_s: float = 0.1, tokens: int = 1, estimate: int = 1) -> list[Charge]:
    return [Charge(moment, moment + lasts_s, tokens, estimate) for moment in at]


def test_a_burst_and_then_the_rate_is_within_the_bucket() -> None:
    at = [0.0] * 10 + [float(second) for second in range(1, 100)]
    assert over_share(at, [1.0] * len(at), BUCKET) == 0.0


def test_one_request_too_many_anywhere_is_seen_whatever_the_order() -> None:
    at = [float(second) for second in range(1, 100)] + [50.5] + [0.0] * 10
    random.Random(1).shuffle(at)
    assert over_share(at, [1.0] * len(at), BUCKET) == pytest.approx(1.0 / 60.0, rel=0.02)


def test_the_worst_window_is_in_parts_of_what_it_allows() -> None:
    assert over_share([5.0] * 12, [1.0] * 12, BUCKET) == pytest.approx(0.2)
    assert over_share([0.0, 10.0], [10.0, 12.0], Bucket(10.0, 60.0)) == pytest.approx(0.2)


def test_windows_are_right_against_all_windows_tried() -> None:
    draw = random.Random(3)
    for _ in range(50):
        at = sorted(draw.uniform(0.0, 20.0) for _ in range(30))
        sizes = [draw.uniform(0.0, 3.0) for _ in at]
        worst = max(
            sum(sizes[first : last + 1]) / BUCKET.allows(at[last] - at[first])
            for first in range(len(at))
            for last in range(first, len(at))
        )
        assert over_share(at, sizes, BUCKET) == pytest.approx(max(0.0, worst - 1.0))


def test_nothing_is_unused_when_the_bucket_is_empty_all_the_time() -> None:
    at = [0.0] * 10 + [float(second) for second in range(1, 100)]
    assert unused_share(charges(*at), BUCKET, None, None, (0.0, 100.0)) == pytest.approx(0.0, abs=1e-9)


def test_a_pause_while_somebody_asks_is_unused() -> None:
    at = [0.0] * 10 + [float(second) for second in range(1, 60)]
    assert unused_share(charges(*at), BUCKET, None, None, (0.0, 100.0)) == pytest.approx(0.4)
    assert unused_share([], BUCKET, None, None, (0.0, 100.0)) == 1.0


def test_a_limit_that_does_not_bind_is_not_unused() -> None:
    at = [0.0] * 10 + [float(second) for second in range(1, 100)]
    assert unused_share(charges(*at), BUCKET, Bucket(1e6, 1e6), 100, (0.0, 100.0)) == pytest.approx(0.0, abs=1e-9)


def test_tokens_that_came_back_and_were_not_used_are_unused() -> None:
    """Of 100 tokens each, half are not used: twice as many requests would have been possible in the long run."""
    at = [0.0] + [100.0 * number for number in range(1, 11)]
    found = charges(*at, lasts_s=1.0, tokens=50, estimate=100)
    assert unused_share(found, None, Bucket(100.0, 60.0), None, (0.0, 1_099.0)) == pytest.approx(0.5, abs=0.05)


def test_slots_that_stood_empty_are_unused() -> None:
    full = [one for second in range(10) for one in charges(*[float(second)] * 2, lasts_s=1.0)]
    assert unused_share(full, None, None, 2, (0.0, 10.0)) == pytest.approx(0.0)
    assert unused_share(full, None, None, 4, (0.0, 10.0)) == pytest.approx(0.5)


def test_the_most_at_once_counts_one_that_follows_another_once() -> None:
    assert most_at_once([(0.0, 1.0), (1.0, 2.0), (0.5, 1.5)]) == 2
    assert most_at_once([]) == 0


def refusal(sent: float, retry_s: float | None) -> Attempt:
    return Attempt(sent, sent + 0.1, 429, retry_s, "rate_limit", has_standing=True)


def test_a_promise_is_broken_by_a_refusal_after_its_moment_alone() -> None:
    answer = Attempt(9.0, 9.5, 200, None, "", has_standing=True)
    assert Ask(0.0, attempts=[refusal(0.0, 1.0), refusal(1.2, 1.0), answer]).broken_promises == 1
    assert Ask(0.0, attempts=[refusal(0.0, 1.0), refusal(0.5, 1.0), answer]).broken_promises == 0
    assert Ask(0.0, attempts=[refusal(0.0, None), refusal(5.0, 1.0)]).broken_promises == 0


def test_the_configuration_of_all_loads_is_valid_and_no_prompt_is_too_large() -> None:
    settings = parse(configuration())
    assert settings.router.replicas == 3
    assert {load.tenant for load in (*STRESSES, *LOADS)} == settings.admission.tenants.keys()
    for load in (*STRESSES, *LOADS):
        body = load.shape.body("tiny", random.Random(1))
        longest = settings.models[0].max_model_len
        assert longest is not None
        assert len(body["prompt"].split()) + load.shape.tokens < longest


class Asked:
    """A crowd that has asked."""

    def __init__(self, asks: list[Ask]) -> None:
        self.asks = asks


def test_the_figures_of_a_load_count_the_answer_of_each_attempt() -> None:
    load = Load("a", {"requests_per_minute": 60, "max_concurrent": 1}, Shape(1, 1))
    ask = Ask(0.0, 3.0, "id", 2, attempts=[refusal(0.0, 1.0), Attempt(1.2, 3.0, 200, None, "", has_standing=False)])
    lost = Ask(0.0, 3.0, failure="RateLimitError: no")
    reported = figures(load, Asked([ask, lost]), [Charge(0.0, 2.0, 2, 2), Charge(1.0, 2.0, 2, 2)], 3.0)  # type: ignore[arg-type]
    assert (reported["asked"], reported["admitted"], reported["failed"], reported["without_standing"]) == (2, 2, 1, 1)
    assert reported["refusals"] == {"rate_limit": 1}
    assert reported["over"] == {"requests": 0.0, "at once": 1.0}


def test_a_small_world_is_the_same_for_the_same_seed() -> None:
    found = run(1, 4)
    assert found == run(1, 4)
    assert found["charged"] > 100
    assert found["over"] == 0.0
    assert found["most_at_once_over"] == 0
    assert found["broken_promises"] == 0


def test_the_result_is_the_worst_of_all() -> None:
    real = {
        "loads": {
            "a": {"over": {"requests": 0.0, "at once": 0.125}, "unused": 0.01, "failed": 1},
            "slots, refused": {"over": {"at once": 0.0}, "unused": 0.3, "failed": 0},
        },
        "calls": {"none": [0.5, 0.7], "limits": [0.6, 0.9]},
    }
    virtual = {1: {"over": 0.02, "unused": 0.015, "failed": 0}}
    found = result_of(real, virtual, {"near": 12.34})
    assert found == {
        "over_limit_share": 0.125,
        "under_use_share": 0.015,
        "failed_after_retries": 1,
        "us_per_decision": 12.3,
        "actor_messages_per_request": 0.15,
    }
    assert found.keys() == BARS.keys()


@pytest.mark.parametrize(("load", "minutes", "share"), [("requests", 1.0, 0.01), ("requests", 3.0, 0.03)])
def test_what_is_reserved_at_the_end_of_a_shorter_run_is_a_part_of_three_minutes(
    load: str, minutes: float, share: float
) -> None:
    real: dict[str, Any] = {
        "loads": {load: {"over": {"requests": 0.0}, "unused": 0.03, "failed": 0}},
        "calls": {"none": [0.0], "limits": [0.0]},
    }
    found = result_of(real, {1: {"over": 0.0, "unused": 0.0, "failed": 0}}, {"near": 1.0}, minutes)
    assert found["under_use_share"] == share
    slots = {"slots, waiting": real["loads"].pop(load)}
    found = result_of(real | {"loads": slots}, {1: {"over": 0.0, "unused": 0.0, "failed": 0}}, {"near": 1.0}, minutes)
    assert found["under_use_share"] == 0.03


def test_quick_is_a_minute_unless_minutes_are_given() -> None:
    assert options_of(["--quick"]).minutes == 1.0
    assert options_of(["--quick", "--minutes", "2"]).minutes == 2.0
    assert options_of([]).minutes == 3.0
