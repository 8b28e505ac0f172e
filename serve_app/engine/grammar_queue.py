"""Decides which grammars an engine may compile: each one is first compiled outside the engine, under a CPU limit.

A compile cannot be interrupted, and its time cannot be predicted from the grammar's size (docs/decisions/engine.md).
So a child process compiles each new grammar first. A grammar for which the child had to be killed is refused; the
engine compiles only the others.

Rules
- One compile at a time, in the order of `HelperQueue`.
- The most recently used verdicts are kept, up to `KEPT_CPU_S` and `KEPT_BYTES` in all. The engine's own cache holds the
  same grammars, so a known grammar costs the engine nothing, and all of them at once cost at most `KEPT_CPU_S`.

Invariant: a grammar that `check` accepts took at most `limit_s` of CPU when it was compiled.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.core.grammar_bounds import MAX_GRAMMAR_BYTES, too_complex
from serve_app.engine.helper_queue import HelperQueue
from serve_app.errors import BadRequest

MAX_COMPILED_BYTES = 8 * 2**20  # per running sequence; a choice of 3,000 words has 4.4 MB
KEPT_CPU_S = 4.0  # hundreds of ordinary schemas
KEPT_BYTES = 32 * 2**20  # half of the engine's own cache
MIN_WEIGHT = 1 / 4096  # of a refusal, which costs the engine nothing and is kept for the client's next attempt


class Grammar(NamedTuple):
    """A grammar to compile. `kind`: json (a schema), regex, ebnf, lark or tag (a structural tag)."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class GrammarVerdict:
    """The cost of a compiled grammar (CPU seconds, compiled bytes), or why it is refused."""

    cpu_s: float = 0.0
    size_bytes: int = 0
    refusal: str = ""
    complex: bool = False

    @property
    def weight(self) -> float:
        """Its share of the cache's capacity."""
        return max(MIN_WEIGHT, 0 if self.refusal else max(self.cpu_s / KEPT_CPU_S, self.size_bytes / KEPT_BYTES))


class GrammarQueue:
    """Accepts or refuses grammars.

    Args:
        compile: compiles a grammar under a CPU limit; called by one task, never concurrently. `check` raises its
            errors, and they are not cached.
    """

    def __init__(self, compile: Callable[[Grammar], Awaitable[GrammarVerdict]]) -> None:
        self._compile = compile
        self._queue = HelperQueue(self._verdict_of)
        self._cached_verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()  # the most recently used last
        self._weight = 0.0

    async def check(self, tenant: str, grammar: Grammar) -> None:
        """Return when the engine may compile the grammar; cancelling this removes it from the queue.

        Raises:
            BadRequest: the grammar is refused or invalid. Also the errors of `compile`.
        """
        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise too_complex(f"it has more than {MAX_GRAMMAR_BYTES} bytes")
        digest = hashlib.sha256(f"{grammar.kind}:{grammar.text}".encode()).digest()
        verdict = self._cached(digest) or await self._queue.ask(tenant, (grammar, digest))
        if verdict.complex:
            raise too_complex(verdict.refusal)
        if verdict.refusal:
            raise BadRequest(f"the grammar or schema cannot be built: {verdict.refusal}")

    async def _verdict_of(self, asked: tuple[Grammar, bytes]) -> GrammarVerdict:
        grammar, digest = asked
        return self._cached(digest) or self._cache(digest, await self._compile(grammar))

    def _cached(self, digest: bytes) -> GrammarVerdict | None:
        verdict = self._cached_verdicts.get(digest)
        if verdict is not None:
            self._cached_verdicts.move_to_end(digest)
        return verdict

    def _cache(self, digest: bytes, verdict: GrammarVerdict) -> GrammarVerdict:
        self._cached_verdicts[digest] = verdict
        self._weight += verdict.weight
        while self._weight > 1:
            self._weight -= self._cached_verdicts.popitem(last=False)[1].weight
        return verdict
