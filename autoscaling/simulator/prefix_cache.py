"""The blocks of prompts that one engine has computed and still holds, as vLLM's prefix cache does.

Rules
- A prompt finds the blocks it begins with, up to the first that is missing; at least one token is always computed.
- The blocks that were used least recently go first, and of one prompt the last ones first.
- Blocks of running sequences are among them. What running sequences share counts for each of them, so a real engine
  holds somewhat more.
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK_TOKENS = 512  # of a hash in Mooncake's traces and in our request log


class PrefixCache:
    """The blocks of one engine. `kv_tokens`: of its KV cache. Every method is O(blocks of the prompt)."""

    def __init__(self, kv_tokens: int) -> None:
        self._most = kv_tokens // BLOCK_TOKENS
        self._blocks: dict[str, None] = {}  # the least recently used one first

    def __len__(self) -> int:
        return len(self._blocks)

    def cached_tokens(self, blocks: Sequence[str]) -> int:
        """The tokens of a prompt's beginning that need no computing."""
        found = 0
        while found < len(blocks) and blocks[found] in self._blocks:
            found += 1
        return found * BLOCK_TOKENS

    def add(self, blocks: Sequence[str]) -> None:
        """A prompt of these blocks is computed, or used again."""
        known = self._blocks
        for block in reversed(blocks[: self._most]):
            known.pop(block, None)
            known[block] = None
        while len(known) > self._most:
            del known[next(iter(known))]
