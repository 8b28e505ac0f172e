"""What a request that has ended teaches: what it used where it ended by itself, that or more where it was cut off."""

from __future__ import annotations

import pytest

from serve_app.core.estimate import ObservedUse
from serve_app.core.queue import RefusalReason
from serve_app.core.receipts import RequestMeasure
from serve_app.errors import EngineUnreachable, Forbidden, Overloaded, ServeAppError, Unavailable
from serve_app.http.request_record import RequestRecord, outcome_of
from serve_app.transport import ResponseStream, TokenUsage, UnreadBytes
from serve_app.types import Operation, Outcome, RequestClass


def record(operation: Operation = Operation.CHAT, *, made: int = 7, usage: TokenUsage | None = None) -> RequestRecord:
    """One that was handed to an engine, which has made so many tokens."""
    found = RequestRecord("a1", None, operation, "tenant", RequestClass.LOW, 100.0)
    found.model = "model"
    found.trace.measure = RequestMeasure(prompt_bytes=40, answers=2)
    found.stream = ResponseStream(UnreadBytes(), lambda: None, lambda: None)
    found.usage = usage
    found.stream.produced.tokens = made
    return found


@pytest.mark.parametrize(
    ("usage", "learned"),
    [
        (TokenUsage(12, 9, 0, "stop"), ObservedUse("tenant", "model", 40, 12, 9, 2)),
        (TokenUsage(12, 9, 0, "length"), ObservedUse("tenant", "model", 40, 12, 9, 2, is_cut_off=True)),
        (TokenUsage(12, 9, 0, "abort"), ObservedUse("tenant", "model", 40, 12, 9, 2, is_cut_off=True)),
        (None, ObservedUse("tenant", "model", 40, 0, 7, 2, is_cut_off=True)),  # its client left, or its engine failed
        (TokenUsage(), None),  # the engine refused it
    ],
)
def test_what_it_teaches_follows_from_how_it_ended(usage: TokenUsage | None, learned: ObservedUse | None) -> None:
    assert record(usage=usage).token_use() == learned


def test_what_made_nothing_or_never_ran_teaches_nothing() -> None:
    waiting = record()
    waiting.stream = None
    assert waiting.token_use() is record(made=0).token_use() is None


@pytest.mark.parametrize("operation", [Operation.EMBEDDING, Operation.SCORE, Operation.RERANK, Operation.TOKENIZE])
def test_what_does_not_generate_teaches_nothing(operation: Operation) -> None:
    assert record(operation, usage=TokenUsage(12, 9, 0, "stop")).token_use() is None


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (Overloaded("full", code="queue_full", retry_after_s=3.0), Outcome.REFUSED, RefusalReason.QUEUE_FULL),
        (Overloaded("no tokens", code="kv_budget"), Outcome.REFUSED, RefusalReason.TIMEOUT),
        (Unavailable("none runs"), Outcome.REFUSED, RefusalReason.NO_REPLICA),
        (Unavailable("an error of ours", code="request_lost"), Outcome.REFUSED, RefusalReason.LOST),
        (Unavailable("no credit", code="limits_unavailable"), Outcome.REFUSED, "limits_unavailable"),
        (EngineUnreachable("gone"), Outcome.ENGINE_FAILED, None),
        (Forbidden("class"), Outcome.BAD_REQUEST, None),
    ],
)
def test_a_refusal_has_a_reason_and_other_errors_have_none(
    error: ServeAppError, outcome: Outcome, reason: str | None
) -> None:
    ended = record()
    ended.outcome = outcome_of(error)
    ended.error = error
    found = ended.receipt(103.0)
    assert (found.outcome, found.refused, found.retry_after_s) == (outcome, reason, error.retry_after_s)
