"""The bound of repetition detection is one of the comparisons that vLLM makes after each token."""

from __future__ import annotations

import math
from typing import Any

import pytest

from serve_app.http.contract import check_values
from serve_app.http.parameter_bounds import MAX_REPETITION_WORK
from serve_app.types import Operation
from tests.requires import requires

requires("vllm")


class CountedTokens(list[int]):
    """Tokens that count how often one of them is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("count", [2, 16, 1000])
def test_repetition_detection_within_its_bound_costs_a_step_no_more_than_the_bound_says(count: int) -> None:
    from vllm.sampling_params import RepetitionDetectionParams
    from vllm.v1.core.sched.utils import check_sequence_repetition

    size = math.isqrt(MAX_REPETITION_WORK // count)
    most = 0
    check_values(Operation.CHAT, {"repetition_detection": {"max_pattern_size": size, "min_count": count}})
    length = size * count
    for odd in range(1, length, max(1, length // 8)):  # one token in the way of a repetition
        for smallest in {1, max(1, size // 2), size, min(size, odd // count + 1)}:
            tokens = CountedTokens([7] * length)
            tokens[-odd] = 8
            check_sequence_repetition(tokens, RepetitionDetectionParams(size, smallest, count))
            most = max(most, tokens.reads)
    assert length // 4 < most <= MAX_REPETITION_WORK
