"""What static and continuous batches of the same requests take, from the measured time of a step.

A step with n running sequences takes `step(n)`; reading prompts takes their tokens times that of one, on top. A request
of m output tokens is in m steps, the first of which reads its prompt. Nothing else takes time: no hand-over to the
engine, nothing between batches.

- `static_s`: batches of `slots` in order of arrival, each over with its longest request. Rows are not padded: vLLM
  drops a row that has ended, so step k of a batch takes step(requests of at least k tokens). This is what the real
  engine does with static batches.
- `padded_s`: the same batches where every row stays to the end: step(size of the batch) x longest. This is the static
  batching of the write-ups, and of frameworks without a scheduler.
- `continuous_s`: a slot that is free takes the next request at the next step.

`bound` is `static_s` over `continuous_s`: the ratio of tokens/s that this engine can show at most. `bound_padded` is
`padded_s` over `continuous_s`: against an engine that pads. `bound_flat` is the ratio of steps: what these lengths
would give on an engine whose step takes the same time whatever runs in it, as a large model's on GPUs nearly does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.strategies.workload import Lengths


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured seconds of a decode step by its sequences, and of one prompt token."""

    by_size: Mapping[int, float]
    prompt_token_s: float

    def step(self, running: int) -> float:
        """Between measured sizes in a straight line; beyond them by the fit."""
        sizes = sorted(self.by_size)
        if sizes[0] <= running <= sizes[-1]:
            return float(np.interp(running, sizes, [self.by_size[size] for size in sizes]))
        base_s, each_s = self.fit()
        return base_s + each_s * running

    def fit(self) -> tuple[float, float]:
        """a and b of a + b n, by least squares; of one size: that time and 0."""
        if len(self.by_size) < 2:
            return next(iter(self.by_size.values())), 0.0
        slope, base = np.polyfit(list(self.by_size), list(self.by_size.values()), 1)
        return float(base), float(slope)


@dataclass(frozen=True, slots=True)
class Predicted:
    """What requests take, in seconds, and the steps of both ways."""

    static_s: float
    padded_s: float
    continuous_s: float
    static_steps: int
    continuous_steps: int

    @property
    def bound(self) -> float:
        return self.static_s / self.continuous_s

    @property
    def bound_padded(self) -> float:
        return self.padded_s / self.continuous_s

    @property
    def bound_flat(self) -> float:
        return self.static_steps / self.continuous_steps


def predict(lengths: Sequence[Lengths], slots: int, times: StepTimes) -> Predicted:
    """Of requests that are all there at once, in this order. Raises ValueError: there are none."""
    if not lengths:
        raise ValueError("there are no requests")
    prompts_s = times.prompt_token_s * sum(prompt for prompt, _ in lengths)
    batches = [[output for _, output in lengths[at : at + slots]] for at in range(0, len(lengths), slots)]
    static_s = sum(times.step(running) for batch in batches for running in running_by_step(batch))
    padded_s = sum(times.step(len(batch)) * max(batch) for batch in batches)
    counts = continuous_steps([output for _, output in lengths], slots)
    continuous_s = sum(times.step(running) for running in counts)
    static_steps = sum(max(batch) for batch in batches)
    return Predicted(static_s + prompts_s, padded_s + prompts_s, continuous_s + prompts_s, static_steps, len(counts))


def running_by_step(outputs: Sequence[int]) -> list[int]:
    """How many requests of a batch run in each of its steps."""
    ends = np.bincount(outputs, minlength=max(outputs) + 1)
    return [int(left) for left in len(outputs) - np.cumsum(ends)[:-1]]


def continuous_steps(outputs: Sequence[int], slots: int) -> list[int]:
    """How many requests run in each step, if a free slot takes the next request at the next step."""
    coming = list(reversed(outputs))
    left = np.empty(0, dtype=np.int64)
    counts = []
    while coming or len(left):
        joins = [coming.pop() for _ in range(min(slots - len(left), len(coming)))]
        left = np.concatenate([left, np.asarray(joins, dtype=np.int64)])
        steps = int(left.min())  # until the next request ends
        counts += [len(left)] * steps
        left = left[left > steps] - steps
    return counts
