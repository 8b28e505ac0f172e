"""How Ray Serve turns a policy's decision into a target: its delays and factors, as a pure function.

A decision has to stand for `upscale_s`, or `downscale_s`, before it is carried out; one in the other direction, or for
the present target, begins the span anew. From zero replicas there is no delay. Replicas fall to one first, and from one
to zero after `to_zero_s`. The tests compare every step with Ray's own wrapper of policies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

ROUNDING_S = 1e-6  # of the difference of two moments


@dataclass(frozen=True, slots=True)
class ServeDelays:
    """A deployment's delays in seconds, and the parts of a change that are carried out. `to_zero_s`: of the last
    replica; None: `downscale_s`."""

    upscale_s: float = 30.0
    downscale_s: float = 120.0
    to_zero_s: float | None = None
    upscale_factor: float = 1.0
    downscale_factor: float = 1.0


AT_ONCE = ServeDelays(upscale_s=0.0, downscale_s=0.0)


class StandingDecision(NamedTuple):
    """Since when a decision stands. `direction`: 1 for more replicas, -1 for fewer, 0: none stands."""

    direction: int = 0
    since: float = 0.0


NOTHING_STANDS = StandingDecision()


def target_after_delays(
    wanted: int, current: int, target: int, delays: ServeDelays, standing: StandingDecision, now: float
) -> tuple[int, StandingDecision]:
    """The new target of a deployment, and what stands after it.

    Args:
        wanted: the policy's decision.
        current: replicas that run.
        target: the present one.
    """
    wanted = _by_factor(wanted, current, delays)
    if current == 0 and wanted > 0:
        return wanted, standing
    wanted = max(0, wanted)
    direction = (wanted > target) - (wanted < target)
    if not direction:
        return target, NOTHING_STANDS
    since = standing.since if standing.direction == direction else now
    if direction > 0:
        delay_s = delays.upscale_s
    elif target == 1:
        delay_s = delays.downscale_s if delays.to_zero_s is None else delays.to_zero_s
    else:
        delay_s = delays.downscale_s
        wanted = max(1, wanted)
    if now - since + ROUNDING_S >= delay_s:
        return wanted, NOTHING_STANDS
    return target, StandingDecision(direction, since)


def _by_factor(wanted: int, current: int, delays: ServeDelays) -> int:
    """The part of the change from the replicas that run which is carried out at once; a decrease is at least one."""
    if current == 0:
        return wanted
    change = wanted - current
    scaled = math.ceil(current + change * (delays.upscale_factor if change > 0 else delays.downscale_factor))
    return scaled - 1 if change < 0 and scaled == current else scaled
