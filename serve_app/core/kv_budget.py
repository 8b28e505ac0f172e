"""How many KV tokens a request reserves, and when it requests more. Pure.

The prompt is an estimate until the engine has counted it (`correct_prompt`).

Invariant: a request's KV tokens cover its known prompt and output, in whole blocks, while the pool has free blocks; it
never requests more than it can use.
"""

from __future__ import annotations

from typing import Protocol

from serve_app.core.memory import GROWTH_SHARE
from serve_app.core.queue import Arrival

KV_REQUEST_BLOCKS = 4  # requested at once by a request that exceeds its estimate: one call a block would be too many
LEAD_STEPS = 4  # engine steps, so tokens of each sequence, that are done before the router receives their tokens


PRESUMED = 8  # requests of one sequence, so that the first few say little about how many would run at once


def requests_at_once(slots: int, requests: int, sequences: int, kv_share: float) -> float:
    """Requests that an engine can run at once, if they are as those that run: each takes its part of the slots, and of
    the KV cache, of which all use `kv_share`. At most its slots."""
    used = max(sequences / slots, kv_share)
    return min(float(slots), (requests + PRESUMED) / (used + PRESUMED / slots))


class KvLimits(Protocol):
    """The limits of a model's engines, in tokens."""

    @property
    def kv_block_tokens(self) -> int: ...

    @property
    def kv_cache_tokens(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


class KvBudget:
    """The tokens of one request.

    Args:
        arrival: with its estimated cost, prompt and output.
        info: limits of the model's engines; None: not known yet, then nothing is rounded or capped.
        max_output_tokens: the most tokens of all answers, by the client's bound; None: no bound.
        sequences: how many it runs; 0: one for each slot.
    """

    def __init__(
        self,
        arrival: Arrival,
        info: KvLimits | None,
        max_output_tokens: int | None = None,
        sequences: int = 0,
    ) -> None:
        begins_with = arrival.prompt_tokens + arrival.produced_tokens
        self._prompt_tokens = arrival.prompt_tokens
        self._sequences = sequences or arrival.slots
        self._block_tokens = 1 if info is None else info.kv_block_tokens
        self.tokens = self._round_up_to_blocks(max(arrival.cost_tokens, begins_with if arrival.produced_tokens else 0))
        self._max_output_tokens = max_output_tokens
        if info is not None:  # do not wait for more than any pool has: vLLM bounds the request by itself
            self.tokens = min(self.tokens, max(self._block_tokens, int(info.kv_cache_tokens * (1 - GROWTH_SHARE))))
        self._longest = None if info is None else self._round_up_to_blocks(info.max_model_len * self._sequences)
        self._unused_output_tokens = max(0, self.tokens - begins_with)
        self.output_tokens = 0  # made by this run so far, of all sequences

    def _round_up_to_blocks(self, tokens: int) -> int:
        """Round up: each sequence begins its own block, and its last block is rarely full."""
        return (max(1, -(-tokens // self._block_tokens)) + self._sequences - 1) * self._block_tokens

    @property
    def _max_tokens(self) -> int | None:
        longest = self._longest
        if self._max_output_tokens is None:
            return longest
        most = self._round_up_to_blocks(self._prompt_tokens + self._max_output_tokens)
        return most if longest is None else min(most, longest)

    def correct_prompt(self, tokens: int) -> None:
        """The engine has counted the prompt: what it is longer than its estimate is missing for the output, and what it
        is shorter is there for it. `on_output` requests what is missing."""
        more, self._prompt_tokens = tokens - self._prompt_tokens, tokens
        self._unused_output_tokens -= more

    @property
    def until_request(self) -> int:
        """Output tokens until `on_output` requests more; at least 1."""
        return max(1, self._unused_output_tokens - LEAD_STEPS * self._sequences + 1)

    def on_output(self, tokens: int) -> int:
        """Count new output tokens; returns how many KV tokens to request because the output will soon exceed the
        estimate. They count as the request's whether they are granted at once or later."""
        self.output_tokens += tokens
        self._unused_output_tokens -= tokens
        short = LEAD_STEPS * self._sequences - self._unused_output_tokens
        if short <= 0:
            return 0
        more = max(KV_REQUEST_BLOCKS, -(-short // self._block_tokens)) * self._block_tokens
        most = self._max_tokens
        if most is not None:
            more = max(0, min(more, most - self.tokens))
        self.tokens += more
        self._unused_output_tokens += more
        return more
