"""Which prompts with log probabilities the engine computes now: as many as fill one of its steps.

Such a prompt is computed in full, whatever prefixes are cached. Twenty of 3,000 tokens would all be in the engine's
batch at once, and a request that comes after them would wait for all of them.

Invariant: of one priority, the prompts that are computed have at most `max_tokens` tokens, or there is one of them;
tenants take turns, each in order of arrival. Prompts of another priority neither wait for them nor hold them up: the
engine itself computes the higher ones first. A prompt whose request ends, in whatever way, holds nobody up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Set
from dataclasses import dataclass

from serve_app.core.turns import TenantTurns


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPrompt:
    """A prompt whose log probabilities are asked for; `tokens` of all answers, each of which computes it anew."""

    request_id: str
    tenant: str
    priority: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    prompt: ScoredPrompt
    begun: asyncio.Future[None]


class PrefillTurns:
    """The turns at one engine. Not thread-safe: one event loop.

    Args:
        max_tokens: of a step of the engine; more would only wait there.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._turns = defaultdict[int, TenantTurns[_Turn]](TenantTurns)  # by priority
        self._running: dict[str, _Turn] = {}  # by request

    @property
    def running(self) -> Set[str]:
        """The requests whose prompts are computed."""
        return self._running.keys()

    @contextlib.asynccontextmanager
    async def turn(self, prompt: ScoredPrompt) -> AsyncIterator[None]:
        """Wait for a turn, which ends with the block, or before it when `end` is called."""
        turn = _Turn(prompt, asyncio.get_running_loop().create_future())
        self._turns[prompt.priority].arrive(prompt.tenant, turn)
        try:
            self._begin(prompt.priority)
            await asyncio.wait([turn.begun])
            yield
        finally:
            if not turn.begun.done():
                self._turns[prompt.priority].leave(prompt.tenant, turn)
                self._begin(prompt.priority)
            elif self._running.get(prompt.request_id) is turn:
                self.end(prompt.request_id)

    def end(self, request_id: str) -> None:
        """The prompt of this request, which had its turn, is computed."""
        prompt = self._running.pop(request_id).prompt
        self._turns[prompt.priority].end(prompt.tenant)
        self._begin(prompt.priority)

    def _begin(self, priority: int) -> None:
        def fits(turn: _Turn) -> bool:
            tokens = sum(one.prompt.tokens for one in self._running.values() if one.prompt.priority == priority)
            return not tokens or tokens + turn.prompt.tokens <= self._max_tokens

        turns = self._turns[priority]
        while (begun := turns.begin_if(fits)) is not None:
            _, turn = begun
            self._running[turn.prompt.request_id] = turn
            turn.begun.set_result(None)
