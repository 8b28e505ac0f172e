"""What another tenant has asked cannot be told from times to first token; what the own tenant has asked can.

`python -m benchmarks.cache_timing` is the measurement; here is as much of it as cannot fail by chance.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.cache_timing.probes import Cell, Prober, collect
from benchmarks.cache_timing.report import times
from benchmarks.common.two_samples import compare
from tests.e2e.stack import TINY, Stack

PROMPT_TOKENS = 1900  # a prefill many times as long as the rest of the exchange
ROUNDS = 30
ALPHA = 1e-6  # 30 against 30 values that are wholly apart have 3e-11; by chance one run in a million is below
BLOCK_TOKENS = 128  # of vLLM's CPU build, the last of a prompt is always computed


@pytest.fixture
def prober(stack: Stack, batch_key: str) -> Iterator[Prober]:
    """The tenant `batch` owns the prompts, `people` attacks: its class is the higher one."""
    opened = Prober(stack.base_url, TINY, batch_key, stack.api_key, PROMPT_TOKENS, np.random.default_rng())
    yield opened
    opened.close()


@pytest.mark.long
def test_first_tokens_tell_within_a_tenant_and_not_between_two(prober: Prober) -> None:
    rng = np.random.default_rng()
    collect(prober, 2, rng)  # first batches of each size compile
    found = collect(prober, ROUNDS, rng)

    assert min(one.cached for one in found[Cell.WITHIN_SAME]) >= PROMPT_TOKENS - 2 * BLOCK_TOKENS
    assert all(one.cached == 0 for cell in Cell if cell is not Cell.WITHIN_SAME for one in found[cell])
    for clock in ("client_ms", "receipt_ms"):
        within = compare(times(found[Cell.WITHIN_OTHER], clock), times(found[Cell.WITHIN_SAME], clock))
        between = compare(times(found[Cell.BETWEEN_OTHER], clock), times(found[Cell.BETWEEN_SAME], clock))
        print(f"{clock}: within {within}, between {between}")
        assert within.p < ALPHA
        assert within.shift < 0
        assert between.p > ALPHA
