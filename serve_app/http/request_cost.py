"""Estimates a request's cost in KV tokens from the requests that have ended in this router.

Invariant: an estimate never exceeds the request's own bound, and equals it until similar requests were observed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.core.estimate import Estimate, EstimateSource, Estimator, LengthRule, ObservedUse
from serve_app.http import request_size
from serve_app.types import Operation


@dataclass(frozen=True, slots=True)
class RequestCost:
    """The estimated cost of a request, in tokens.

    Args:
        prompt_bytes: of its prompts.
        prompt_tokens: of its prompts together.
        output_tokens: of its answers together.
        answers: the number of answers requested.
        source: the data behind the output estimate.
        max_kv_tokens: the upper bound of prompts and answers together; None: the request names no bound.
        prompts: the number of prompts.
    """

    prompt_bytes: int
    prompt_tokens: int
    output_tokens: int
    answers: int
    source: EstimateSource
    max_kv_tokens: int | None
    prompts: int = 1

    @property
    def tokens_per_sequence(self) -> float:
        """The mean of prompt and answer per sequence."""
        return self.prompt_tokens / self.prompts + self.output_tokens / self.answers

    @property
    def tokens(self) -> int:
        """Prompts and answers together, at least 1."""
        return max(1, self.prompt_tokens + self.output_tokens)


class CostEstimator:
    """Makes the estimates of one router replica.

    Args:
        quantile: the share of similar answers that need no more than their estimate.
    """

    def __init__(self, quantile: float) -> None:
        self.estimator = Estimator(quantile)

    def configure(self, quantile: float) -> None:
        """Set the quantile for requests that arrive from now on."""
        self.estimator.configure(quantile)

    def estimate(
        self, operation: Operation, body: Mapping[str, Any], tenant: str, model: str, size: int
    ) -> RequestCost:
        """The estimated cost of this request; `size`: bytes of its prompts."""
        if not operation.generates:
            tokens = -(-size // request_size.BYTES_PER_TOKEN)
            return RequestCost(size, tokens, 0, 1, EstimateSource.PRIOR, tokens)
        bound, answers = request_size.output_bound(body), request_size.answers(operation, body)
        found = self.estimator.estimate(tenant, model, size, bound)
        each = _output_tokens_per_answer(found, bound)
        most = None if bound is None else found.prompt_tokens + answers * bound
        prompts = request_size.prompts(operation, body)
        return RequestCost(size, found.prompt_tokens, answers * each, answers, found.source, most, prompts)

    def observe(self, use: ObservedUse) -> None:
        """Learn from a generating request that has ended, with any outcome."""
        self.estimator.observe(use)


def _output_tokens_per_answer(found: Estimate, bound: int | None) -> int:
    """Without observed requests the client's own bound is the better guess: an excess is returned soon, a shortage
    costs other requests their blocks."""
    return bound if found.source is EstimateSource.PRIOR and bound is not None else found.output_tokens


def slots_of(
    operation: Operation, sequences: int, cost: RequestCost, length_rule: LengthRule | None, max_slots: int
) -> int:
    """The slots that the request occupies in a replica's batch.

    Args:
        length_rule: slots of long sequences; not for embeddings: an embedding is one step, bounded by its tokens.
        max_slots: the slots of the largest replica.
    """
    if operation is Operation.EMBEDDING:
        return min(sequences, max_slots)  # inputs end one by one: a call with many takes one whole replica at most
    return sequences if length_rule is None else length_rule.slots(sequences, cost.tokens_per_sequence, max_slots)
