"""How many KV tokens a request is given, and how it gets more. Pure.

Invariant: what a request holds covers prompt and output as far as they are known, in whole blocks, while the pool has
them to give; it never asks for more than it can come to use.
"""

from __future__ import annotations

from serve_app.core.memory import GROWTH_SHARE
from serve_app.core.queue import Arrival
from serve_app.transport import EngineInfo

GROW_BLOCKS = 4  # asked for at once by a request that outgrows its estimate: a call for each block would be many
LEAD_STEPS = 4  # of the engine, which has made that many tokens of each sequence before the router hears of them


class Budget:
    """The tokens of one request.

    Args:
        arrival: with its estimated cost, prompt and output.
        info: of the model's engines; None: not known yet, then nothing is rounded or capped.
        most_tokens: what it can come to use, prompt and all answers, by the client's bound; None: there is none.
        sequences: how many it runs; 0: as many as it takes slots.
    """

    def __init__(
        self, arrival: Arrival, info: EngineInfo | None, most_tokens: int | None = None, sequences: int = 0
    ) -> None:
        self._sequences = sequences or arrival.slots
        self._block = 1 if info is None else info.kv_block_tokens
        self.tokens = self._in_blocks(arrival.cost_tokens)
        self._most = None if most_tokens is None else self._in_blocks(most_tokens)
        if info is not None:  # what no pool can give is not waited for: vLLM bounds it by itself
            self.tokens = min(self.tokens, max(self._block, int(info.kv_cache_tokens * (1 - GROWTH_SHARE))))
            longest = self._in_blocks(info.max_model_len * self._sequences)
            self._most = longest if self._most is None else min(self._most, longest)
        self._output_left = max(0, self.tokens - arrival.prompt_tokens)
        self.output_tokens = 0  # made so far, of all sequences

    def _in_blocks(self, tokens: int) -> int:
        """Each sequence begins a block of its own, and the last one is seldom full."""
        return max(1, (-(-tokens // self._block) + self._sequences - 1) * self._block)

    def produced(self, tokens: int) -> int:
        """The engine has made so many tokens more; returns how many KV tokens to ask for, since the output will soon
        exceed the estimate. They count as the request's whether they are given at once or later."""
        self.output_tokens += tokens
        self._output_left -= tokens
        short = LEAD_STEPS * self._sequences - self._output_left
        if short <= 0:
            return 0
        more = max(GROW_BLOCKS, -(-short // self._block)) * self._block
        if self._most is not None:
            more = max(0, min(more, self._most - self.tokens))
        self.tokens += more
        self._output_left += more
        return more
