"""Which grammars an engine may be asked to compile: each is compiled once before, outside the engine, under a limit.

A compile cannot be interrupted, and no size tells how long it takes (docs/decisions.md). So a child process compiles
each new grammar first; what it had to be killed for is refused, and the engine compiles only what it got through.

Rules
- One compile at a time. Tenants take turns; of a tenant, who came first. Who has gone is passed over.
- A verdict is kept while it is among the last of `KEPT_CPU_S` and `KEPT_BYTES` in all: the engine's own cache holds the
  same grammars, so a known one costs it nothing, and all of them at once cost it no more than `KEPT_CPU_S`.

Invariant: what `check` has let through cost at most `limit_s` of CPU when it was compiled.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.core.grammar_bounds import MAX_GRAMMAR_BYTES, too_complex
from serve_app.errors import BadRequest

MAX_COMPILED_BYTES = 8 * 2**20  # of each running sequence's grammar; 3,000 words to choose from have 4.4 MB
KEPT_CPU_S = 4.0  # hundreds of ordinary schemas
KEPT_BYTES = 32 * 2**20  # half of the engine's own cache
MIN_WEIGHT = 1 / 4096  # a refusal costs the engine nothing, and is kept for its sender's next attempt


class Grammar(NamedTuple):
    """What is to be compiled. `kind`: json (a schema), regex, ebnf, lark or tag (a structural tag)."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What compiling a grammar took, or why it is refused. CPU seconds; `size_bytes` of what was compiled."""

    cpu_s: float = 0.0
    size_bytes: int = 0
    refusal: str = ""
    complex: bool = False

    @property
    def weight(self) -> float:
        """Its part of what is kept."""
        return max(MIN_WEIGHT, 0 if self.refusal else max(self.cpu_s / KEPT_CPU_S, self.size_bytes / KEPT_BYTES))


class _Job(NamedTuple):
    grammar: Grammar
    digest: bytes
    verdict: asyncio.Future[Verdict]


class Grammars:
    """Lets grammars through, or refuses them.

    Args:
        compile: compiles one under a limit of CPU; called by one task, never twice at a time. What it raises is told
            to who asked, and not kept.
    """

    def __init__(self, compile: Callable[[Grammar], Awaitable[Verdict]]) -> None:
        self._compile = compile
        self._waiting: dict[str, deque[_Job]] = {}  # by tenant; whose turn it is first
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()  # the latest used last
        self._weight = 0.0
        self._worker: asyncio.Task[None] | None = None

    async def check(self, tenant: str, grammar: Grammar) -> None:
        """Return when the engine may compile it; cancelling this takes it out of the queue.

        Raises:
            BadRequest: it may not, or it is none. What `compile` raises.
        """
        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise too_complex(f"it has more than {MAX_GRAMMAR_BYTES} bytes")
        digest = hashlib.sha256(f"{grammar.kind}:{grammar.text}".encode()).digest()
        verdict = self._remembered(digest)
        if verdict is None:
            job = _Job(grammar, digest, asyncio.get_running_loop().create_future())
            self._waiting.setdefault(tenant, deque()).append(job)
            if self._worker is None or self._worker.done():
                self._worker = asyncio.create_task(self._work(), name="grammars", context=contextvars.Context())
            verdict = await job.verdict
        if verdict.complex:
            raise too_complex(verdict.refusal)
        if verdict.refusal:
            raise BadRequest(f"the grammar or schema cannot be built: {verdict.refusal}")

    async def _work(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            jobs = self._waiting.pop(tenant)
            job = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs  # behind the others
            if job.verdict.done():
                continue
            try:
                verdict = self._remembered(job.digest) or self._remember(job.digest, await self._compile(job.grammar))
            except Exception as error:  # noqa: BLE001 - it is raised where somebody waits
                if not job.verdict.done():
                    job.verdict.set_exception(error)
                continue
            if not job.verdict.done():
                job.verdict.set_result(verdict)

    def _remembered(self, digest: bytes) -> Verdict | None:
        verdict = self._known.get(digest)
        if verdict is not None:
            self._known.move_to_end(digest)
        return verdict

    def _remember(self, digest: bytes, verdict: Verdict) -> Verdict:
        self._known[digest] = verdict
        self._weight += verdict.weight
        while self._weight > 1:
            self._weight -= self._known.popitem(last=False)[1].weight
        return verdict
