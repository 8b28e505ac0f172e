"""What a request will cost in KV tokens, learned from those that have ended in this router.

Invariant: a request is given no more than it asks for, and, until something was learned of such requests, all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.core.estimate import Estimate, Estimator, LengthRule, Source, Use
from serve_app.http import request_size
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
        prompts: how many the prompt tokens are those of.
    """

    prompt_bytes: int
    prompt_tokens: int
    output_tokens: int
    answers: int
    source: Source
    most_tokens: int | None
    prompts: int = 1

    @property
    def tokens_each(self) -> float:
        """Of each sequence, the mean: its prompt and its answer."""
        return self.prompt_tokens / self.prompts + self.output_tokens / self.answers

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

    def of(self, operation: Operation, body: Mapping[str, Any], tenant: str, model: str, size: int) -> Cost:
        """What this request, with a prompt of so many bytes, will cost."""
        if not operation.generates:
            tokens = -(-size // request_size.BYTES_PER_TOKEN)
            return Cost(size, tokens, 0, 1, Source.PRIOR, tokens)
        bound, answers = request_size.output_bound(body), request_size.answers(operation, body)
        found = self._estimator.estimate(tenant, model, size, bound)
        each = _reserved(found, bound)
        most = None if bound is None else found.prompt_tokens + answers * bound
        prompts = request_size.prompts(operation, body)
        return Cost(size, found.prompt_tokens, answers * each, answers, found.source, most, prompts)

    def observe(self, use: Use) -> None:
        """A request that generates has ended, however it did."""
        self._estimator.observe(use)


def _reserved(found: Estimate, bound: int | None) -> int:
    """Of each answer. While nothing is known of such requests the client's own bound is the better guess: what is given
    too much comes back in a moment, what is missing costs others their blocks."""
    return bound if found.source is Source.PRIOR and bound is not None else found.output_tokens


def slots_of(operation: Operation, sequences: int, cost: Cost, lengths: LengthRule | None, largest: int) -> int:
    """What the request takes of a replica's batch.

    Args:
        lengths: what long sequences weigh; only of what generates: an embedding is one step, bounded by its tokens.
        largest: the slots of the largest replica.
    """
    if operation is Operation.EMBEDDING:
        return min(sequences, largest)  # inputs end one by one: a call of many takes a whole replica, not more
    return sequences if lengths is None else lengths.slots(sequences, cost.tokens_each, largest)
