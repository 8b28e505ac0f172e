"""How many KV tokens a request is given, and how it gets more. Pure.

Invariant: what a request holds covers prompt and output as far as they are known, in whole blocks, while the pool has
them to give.
"""

from __future__ import annotations

from typing import Protocol

from serve_app.core.admission import Arrival
from serve_app.core.leases import GROWTH_SHARE
from serve_app.engine.protocol import EngineInfo

GROW_BLOCKS = 4  # asked for at once by a request that outgrows its estimate: a call for each block would be many


class Growing(Protocol):
    """Who gives a request more."""

    def grow(self, request_id: str, tokens: int) -> bool: ...


class Budget:
    """The tokens of one request.

    Args:
        arrival: with its estimated cost, prompt and output.
        info: of the model's engines; None: not known yet, then nothing is rounded or capped.
    """

    def __init__(self, arrival: Arrival, info: EngineInfo | None) -> None:
        self._request_id = arrival.request_id
        self._block = 1 if info is None else info.kv_block_tokens
        blocks = -(-arrival.cost_tokens // self._block)
        # Each sequence of it begins a block of its own, and the last one is seldom full.
        tokens = max(1, (blocks + arrival.slots - 1) * self._block)
        if info is not None:  # what no pool can give is not waited for: vLLM bounds it by itself
            tokens = min(tokens, max(self._block, int(info.kv_cache_tokens * (1 - GROWTH_SHARE))))
        self.tokens = tokens
        self._output_left = max(0, tokens - arrival.prompt_tokens)

    def produced(self, desk: Growing, tokens: int) -> None:
        """The engine has made so many more; what exceeds the estimate grows the budget, as far as the pool can give."""
        self._output_left -= tokens
        if self._output_left < 0:
            more = GROW_BLOCKS * self._block
            desk.grow(self._request_id, more)
            self._output_left += more  # given or not: asked for again when that much more has been made
