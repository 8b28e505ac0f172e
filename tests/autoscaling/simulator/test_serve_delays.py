"""Serve's delays as the simulator applies them, against Ray's own wrapper of policies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve import autoscaling_policy
from ray.serve.config import AutoscalingConfig

from autoscaling.simulator.serve_delays import NOTHING_STANDS, ServeDelays, target_after_delays
from tests.effort import examples

STEPS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.sampled_from([0.25, 1.0, 7.0])), min_size=1, max_size=40
)
DELAYS = st.builds(
    ServeDelays,
    upscale_s=st.sampled_from([0.0, 1.0, 5.0]),
    downscale_s=st.sampled_from([0.0, 2.0, 10.0]),
    to_zero_s=st.none() | st.sampled_from([0.0, 4.0]),
    upscale_factor=st.sampled_from([0.5, 1.0, 2.0]),
    downscale_factor=st.sampled_from([0.3, 1.0]),
)


def by_ray(delays: ServeDelays, steps: list[tuple[int, int, float]]) -> list[int]:
    """The targets that Serve's controller would set: wanted and running replicas, and the seconds since the last."""
    config = AutoscalingConfig(
        min_replicas=0,
        max_replicas=100,
        upscale_delay_s=delays.upscale_s,
        downscale_delay_s=delays.downscale_s,
        downscale_to_zero_delay_s=delays.to_zero_s,
        upscaling_factor=delays.upscale_factor,
        downscaling_factor=delays.downscale_factor,
    )
    wrapped = autoscaling_policy._apply_app_level_autoscaling_config(
        lambda contexts: ({"m": contexts["m"].wanted}, {})  # type: ignore[arg-type,return-value,index]
    )
    target = 1
    state: Any = {}
    found = []
    clock = SimpleNamespace(now=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoscaling_policy, "time", SimpleNamespace(time=lambda: clock.now))
        for wanted, current, span_s in steps:
            clock.now += span_s
            context = SimpleNamespace(
                config=config,
                current_num_replicas=current,
                target_num_replicas=target,
                total_num_requests=0.0,  # as our policy sets it while no replica runs
                policy_state=state,
                wanted=wanted,
            )
            targets, states = wrapped({"m": context})  # type: ignore[dict-item]
            target = targets["m"]  # type: ignore[index]
            state = states["m"]  # type: ignore[index]
            found.append(target)
    return found


def by_us(delays: ServeDelays, steps: list[tuple[int, int, float]]) -> list[int]:
    target = 1
    standing = NOTHING_STANDS
    now = 0.0
    found = []
    for wanted, current, span_s in steps:
        now += span_s
        target, standing = target_after_delays(wanted, current, target, delays, standing, now)
        found.append(target)
    return found


@settings(max_examples=examples(150))
@given(DELAYS, STEPS)
def test_the_target_is_the_one_that_serve_would_set(delays: ServeDelays, steps: list[tuple[int, int, float]]) -> None:
    assert by_us(delays, steps) == by_ray(delays, steps)


def test_a_decision_in_the_other_direction_begins_the_delay_anew() -> None:
    delays = ServeDelays(upscale_s=2.0, downscale_s=2.0)
    assert by_us(delays, [(3, 1, 1.0), (3, 1, 1.0), (0, 1, 0.5), (3, 1, 1.0), (3, 1, 1.0), (3, 1, 1.0)])[-2:] == [1, 3]
