"""What is done to which process, in which order, and what it may cost. Pure.

Invariant: of the kinds that can be done, the one that was done least often comes next.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

KILL_EVERY_S = 5.0
HUNG_S = 60.0  # without a byte, with a replica ready
BARS: Mapping[str, float] = {
    "failed": 0,
    "hung": 0,
    "mismatched": 0,
    "duplicated_tokens": 0,
    "leaked_leases": 0,
    "not_continuable": 0,
}
MIGRATIONS_BAR = 20  # at least
NEAR_TIE_BAR = 0.005  # of the requests
GAP_BAR_MS = 1_000.0
FREEZE_BAR_MS = 12_000.0


class Fault(StrEnum):
    """What is done, to which process."""

    ENGINE = "engine"  # the replica; its EngineCore goes with it
    ENGINE_CORE = "engine_core"  # EngineCore alone
    FREEZE = "freeze"  # SIGSTOP of EngineCore
    DRAIN = "drain"  # `serve-app drain REPLICA`
    ROUTER = "router"
    HAPROXY = "haproxy"
    QUOTA = "quota_actor"
    CONTROLLER = "controller"


ON_ENGINES = frozenset({Fault.ENGINE, Fault.ENGINE_CORE, Fault.FREEZE, Fault.DRAIN})
AT_EDGE = frozenset({Fault.ROUTER, Fault.HAPROXY})  # these cut their clients' connections
OF_VLLM = frozenset({Fault.ENGINE_CORE, Fault.FREEZE})  # the simulated engine has no other process


@dataclass(frozen=True, slots=True)
class Act:
    """A part of the run with faults of its own.

    Args:
        faults: the kinds. keyed: requests have an Idempotency-Key, by which they are repeated.
        share: of the run's time or requests.
    """

    faults: tuple[Fault, ...]
    keyed: bool
    share: float


def acts_of(possible: Sequence[Fault]) -> list[Act]:
    """First what no client may notice, without keys; then everything, with keys where connections may be cut."""
    inside = tuple(fault for fault in possible if fault not in AT_EDGE)
    if inside in ((), tuple(possible)):
        return [Act(tuple(possible), not inside, 1.0)]
    return [Act(inside, False, 0.5), Act(tuple(possible), True, 0.5)]


def due(act: Act, done: Mapping[Fault, int], draw: random.Random) -> list[Fault]:
    """The act's kinds, first those that were done least often in it, among equals in random order."""
    kinds = list(act.faults)
    draw.shuffle(kinds)
    return sorted(kinds, key=lambda fault: done.get(fault, 0))


def signal_of(fault: Fault, done: int) -> signal.Signals | None:
    """The signal for the process, after so many faults of the kind: in turn one that it cannot see, and one that asks
    it to end. None: a command does it."""
    match fault:
        case Fault.DRAIN:
            return None
        case Fault.FREEZE:
            return signal.SIGSTOP
        case _:
            return signal.SIGTERM if done % 2 else signal.SIGKILL


def gap_bar_ms(fault: Fault) -> float:
    """The longest pause that a stream may have by this fault."""
    return FREEZE_BAR_MS if fault is Fault.FREEZE else GAP_BAR_MS
