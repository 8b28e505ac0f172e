"""Sizes of sessions: bytes as KV tokens in whole blocks, and amounts rounded up to buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.memory import bytes_for_tokens, round_up_to_bucket, tokens_in_bytes


@given(
    size=st.integers(0, 10**12),
    block=st.integers(1, 64),
    blocks=st.integers(1, 10**6),
    block_bytes=st.integers(1, 10**7),
)
def test_tokens_of_bytes_are_whole_blocks_that_fit(size: int, block: int, blocks: int, block_bytes: int) -> None:
    pool = (blocks * block_bytes, blocks * block, block)
    tokens = tokens_in_bytes(size, *pool)
    assert tokens % block == 0
    assert tokens // block == size // block_bytes
    assert bytes_for_tokens(tokens, *pool) <= size
    assert tokens_in_bytes(bytes_for_tokens(tokens, *pool), *pool) == tokens


def test_amounts_are_rounded_up_to_their_bucket_and_above_the_largest_to_its_multiple() -> None:
    sizes = (4 * 10**9, 12 * 10**9, 16 * 10**9, 64 * 10**9)
    assert round_up_to_bucket(1, sizes) == 4 * 10**9
    assert round_up_to_bucket(12 * 10**9, sizes) == 12 * 10**9
    assert round_up_to_bucket(12 * 10**9 + 1, sizes) == 16 * 10**9
    assert round_up_to_bucket(65 * 10**9, sizes) == 128 * 10**9
    assert round_up_to_bucket(7, (5, 10)) == 10
    assert round_up_to_bucket(7, ()) == 7


@pytest.mark.parametrize(("amount", "sizes"), [(-1, (1,)), (1, (2, 1)), (1, (0, 1))])
def test_a_bucket_that_makes_no_sense_is_refused(amount: int, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sizes"):
        round_up_to_bucket(amount, sizes)


@given(st.integers(0, 10**12), st.sets(st.integers(1, 10**11), min_size=1).map(sorted))
def test_a_bucket_is_never_below_the_amount_and_never_a_size_too_large(amount: int, sizes: list[int]) -> None:
    size = round_up_to_bucket(amount, sizes)
    assert size >= amount
    assert not any(amount <= smaller < size for smaller in sizes)
    assert size in sizes or (size % sizes[-1] == 0 and size - sizes[-1] < amount)
