"""What one engine has computed and still holds, as vLLM's prefix cache does: blocks of prompts, and requests that were
stopped.

Rules
- A prompt finds the blocks it begins with, up to the first that is missing; at least one token is always computed.
- The blocks that were used least recently go first, and of one prompt the last ones first.
- A request that was stopped finds what it had computed, unless others that were stopped since have taken the room.
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
        self._kv_tokens = kv_tokens
        self._stopped: dict[str, int] = {}  # by request, its tokens; the one that was stopped first is the first
        self._stopped_tokens = 0

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

    def keep(self, request: str, tokens: int) -> None:
        """A request was stopped, of which so many tokens were computed. O(1) amortised."""
        self.take(request)
        self._stopped[request] = tokens
        self._stopped_tokens += tokens
        while self._stopped_tokens > self._kv_tokens:
            self.take(next(iter(self._stopped)))

    def take(self, request: str) -> int:
        """The tokens of a stopped request that need no computing; it is no longer one."""
        tokens = self._stopped.pop(request, 0)
        self._stopped_tokens -= tokens
        return tokens
