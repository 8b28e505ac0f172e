"""The strategies under comparison, as batch policies before one engine.

Invariant: no policy lets more requests run than the engine has slots, so all have the same hardware.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from benchmarks.strategies.workload import Ask
from serve_app.core.batching import PRESETS, BatchPolicy, Sizing

STATIC = "static-32"
CONTINUOUS = "continuous"
GATED = "continuous-gated"
SORTED_PROMPT = "sorted-by-prompt"
SORTED_ORACLE = "sorted-by-output"
SLOTS = 32  # of the engine under the headline and under load
UNKNOWN = 1  # tokens that stand for a length that a strategy does not know: the same for all


class Knows(enum.StrEnum):
    """What a strategy knows of a request's length when it forms batches."""

    PROMPT = "prompt"
    OUTPUT = "output"  # an oracle: exact only here, where no answer may end before its `max_tokens`
    BOTH = "both"  # the prompt, and `max_tokens` as clients set it; here it is exact, too


@dataclass(frozen=True, slots=True)
class Strategy:
    """`policy`: None is the engine's own continuous batching."""

    name: str
    policy: BatchPolicy | None
    knows: Knows = Knows.BOTH

    def lengths(self, ask: Ask) -> tuple[int, int]:
        """Prompt and output tokens of a request as this strategy knows them."""
        prompt = UNKNOWN if self.knows is Knows.OUTPUT else ask.prompt
        return prompt, UNKNOWN if self.knows is Knows.PROMPT else ask.output


def complexity(policy: BatchPolicy | None) -> str:
    """What forming batches costs with n requests that wait and batches of b: for a request, and for a batch."""
    if policy is None or policy.is_continuous:
        return "O(1), none"
    if policy.by_length:
        return "O(log n), O(n + b)"
    return "O(b), O(b)" if policy.sizing is Sizing.PROMPT_LENGTH else "O(1), O(b)"


def at_slots(policy: BatchPolicy, slots: int, max_queued: int | None = None) -> BatchPolicy:
    """The policy where `slots` requests can run."""
    return dataclasses.replace(policy, max_size=min(policy.max_size, slots), max_queued=max_queued)


def strategies(slots: int, max_queued: int | None = None) -> dict[str, Strategy]:
    """Every preset at these slots; sorted once by what a service knows and once by an oracle. The two that the headline
    compares are side by side, so that they meet the same moments of the machine."""
    policies = {name: at_slots(policy, slots, max_queued) for name, policy in PRESETS.items()}
    by_length = policies.pop("sorted-32")
    gated = policies.pop("continuous")
    found = [Strategy(STATIC, policies.pop(STATIC)), Strategy(CONTINUOUS, None), Strategy(GATED, gated)]
    found += [Strategy(SORTED_PROMPT, by_length, Knows.PROMPT), Strategy(SORTED_ORACLE, by_length, Knows.OUTPUT)]
    found += [Strategy(name, policy) for name, policy in policies.items()]
    return {one.name: one for one in found}
