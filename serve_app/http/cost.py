"""What a request will cost in KV tokens, learned from those that have ended in this router.

Invariant: a request is given no more than it asks for, and, until something was learned of such requests, all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.core.estimate import Estimate, Estimator, Source, Use
from serve_app.http import measure
from serve_app.types import Operation


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request will cost, in tokens.

    Args:
        prompt_bytes: of its prompt.
        prompt_tokens: of its prompt.
        output_tokens: of all its answers.
        answers: how many it asks for.
        source: what the output was learned from.
        most_tokens: what it can come to at most; None: it names no bound.
    """

    prompt_bytes: int
    prompt_tokens: int
    output_tokens: int
    answers: int
    source: Source
    most_tokens: int | None

    @property
    def tokens(self) -> int:
        """Prompt and answers together, 1 at least."""
        return max(1, self.prompt_tokens + self.output_tokens)


class Costs:
    """Estimates of one router replica.

    Args:
        quantile: of the answers of a kind: so many of them need no more than they were given.
    """

    def __init__(self, quantile: float) -> None:
        self._estimator = Estimator(quantile)

    def configure(self, quantile: float) -> None:
        """Another quantile, for requests that come from now on."""
        self._estimator.configure(quantile)

    def of(self, operation: Operation, body: Mapping[str, Any], tenant: str, model: str) -> Cost:
        """What this request will cost."""
        size = measure.prompt_bytes(operation, body)
        if not operation.generates:
            tokens = -(-size // measure.BYTES_PER_TOKEN)
            return Cost(size, tokens, 0, 1, Source.PRIOR, tokens)
        bound, answers = measure.output_bound(body), measure.answers(operation, body)
        found = self._estimator.estimate(tenant, model, size, bound)
        each = _reserved(found, bound)
        most = None if bound is None else found.prompt_tokens + answers * bound
        return Cost(size, found.prompt_tokens, answers * each, answers, found.source, most)

    def observe(self, use: Use) -> None:
        """A request that generates has ended, however it did."""
        self._estimator.observe(use)


def _reserved(found: Estimate, bound: int | None) -> int:
    """Of each answer. While nothing is known of such requests the client's own bound is the better guess: what is given
    too much comes back in a moment, what is missing costs others their blocks."""
    return bound if found.source is Source.PRIOR and bound is not None else found.output_tokens
