"""What a request that has ended teaches: what it used where it ended by itself, that or more where it was cut off."""

from __future__ import annotations

import pytest

from serve_app.core.estimate import Source, Use
from serve_app.core.queue import Reason
from serve_app.errors import EngineUnreachable, Forbidden, Overloaded, ServeAppError, Unavailable
from serve_app.http.request_cost import Cost
from serve_app.http.request_record import Record
from serve_app.transport import Stream, Unread, Usage
from serve_app.types import Operation, Outcome, RequestClass


def record(operation: Operation = Operation.CHAT, *, made: int = 7, usage: Usage | None = None) -> Record:
    """One that was handed to an engine, which has made so many tokens."""
    found = Record("a1", None, operation, "tenant", RequestClass.LOW, 100.0)
    found.model = "model"
    found.cost = Cost(40, 10, 512, 2, Source.PRIOR, None)
    found.stream, found.usage = Stream(Unread(), lambda: None), usage
    found.stream.tokens = made
    return found


@pytest.mark.parametrize(
    ("usage", "learned"),
    [
        (Usage(12, 9, 0, "stop"), Use("tenant", "model", 40, 12, 9, 2)),
        (Usage(12, 9, 0, "length"), Use("tenant", "model", 40, 12, 9, 2, cut=True)),
        (Usage(12, 9, 0, "abort"), Use("tenant", "model", 40, 12, 9, 2, cut=True)),
        (None, Use("tenant", "model", 40, 0, 7, 2, cut=True)),  # its client left, or its engine failed
        (Usage(), None),  # the engine refused it
    ],
)
def test_what_it_teaches_follows_from_how_it_ended(usage: Usage | None, learned: Use | None) -> None:
    assert record(usage=usage).use() == learned


def test_what_made_nothing_or_never_ran_teaches_nothing() -> None:
    waiting = record()
    waiting.stream = None
    assert waiting.use() is record(made=0).use() is None


@pytest.mark.parametrize("operation", [Operation.EMBEDDING, Operation.TOKENIZE])
def test_what_does_not_generate_teaches_nothing(operation: Operation) -> None:
    assert record(operation, usage=Usage(12, 9, 0, "stop")).use() is None


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (Overloaded("full", code="queue_full", retry_after_s=3.0), Outcome.REFUSED, Reason.QUEUE_FULL),
        (Overloaded("no tokens", code="kv_budget"), Outcome.REFUSED, Reason.TIMEOUT),
        (Unavailable("none runs"), Outcome.REFUSED, Reason.NO_REPLICA),
        (EngineUnreachable("gone"), Outcome.ENGINE_FAILED, None),
        (Forbidden("class"), Outcome.BAD_REQUEST, None),
    ],
)
def test_a_refusal_has_a_reason_and_other_errors_have_none(
    error: ServeAppError, outcome: Outcome, reason: Reason | None
) -> None:
    ended = record()
    ended.failed(error)
    found = ended.receipt(103.0)
    assert (found.outcome, found.refused, found.retry_after_s) == (outcome, reason, error.retry_after_s)
