"""When a request goes to the next model of its route, and when it ends."""

from __future__ import annotations

import pytest

from serve_app.core.names import HopReason, ModelHops
from serve_app.core.queue import RefusalReason, Refuse, refusal_error
from serve_app.errors import (
    BadRequest,
    EngineFailed,
    EngineUnreachable,
    Forbidden,
    InsufficientMemory,
    NotFound,
    OperationUnknown,
    RateLimited,
    RequestFailed,
    ServeAppError,
    Unavailable,
)


def reason(error: ServeAppError, *models: str, has_answer: bool = False, deadline: float | None = None) -> object:
    hops = ModelHops(models or ("old", "new"))
    return hops.reason(error, has_answer=has_answer, deadline=deadline, now=10.0)


def refused(why: RefusalReason) -> ServeAppError:
    return refusal_error(Refuse("id", why, 1.0))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (refused(RefusalReason.NO_REPLICA), HopReason.NO_REPLICA),
        (Unavailable("no replica of old is running"), HopReason.NO_REPLICA),
        (NotFound("the model leaves", code="model_not_found"), HopReason.NO_REPLICA),
        (refused(RefusalReason.QUEUE_FULL), HopReason.QUEUE_FULL),
        (refused(RefusalReason.SHED), HopReason.EARLY_REFUSAL),
        (refused(RefusalReason.DEADLINE), HopReason.EARLY_REFUSAL),
        (refused(RefusalReason.TIMEOUT), HopReason.EARLY_REFUSAL),
        (refused(RefusalReason.SESSIONS), HopReason.EARLY_REFUSAL),
        (EngineFailed("the engine died"), HopReason.ENGINE_FAILED),
        (EngineUnreachable("the replica drains"), HopReason.ENGINE_FAILED),
        (OperationUnknown("all are of an earlier release"), HopReason.NO_REPLICA),
        (RequestFailed("the engine could not handle this request"), HopReason.ENGINE_FAILED),
        (RateLimited("requests per minute"), None),
        (RateLimited("tokens per day", code="quota"), None),
        (InsufficientMemory("no KV tokens"), None),
        (Unavailable("the quota actor does not answer", code="quota_away"), None),
        (refused(RefusalReason.TOO_LARGE), HopReason.TOO_LARGE),
        (BadRequest("the prompt is too long", code="context_length_exceeded"), HopReason.TOO_LARGE),
        (refused(RefusalReason.LOST), None),
        (BadRequest("`n` is too large"), None),
        (Forbidden("not this key"), None),
    ],
)
def test_what_another_model_can_mend_goes_there_and_all_else_ends(error: ServeAppError, expected: object) -> None:
    assert reason(error) is expected


@pytest.mark.parametrize("error", [EngineFailed("died"), refused(RefusalReason.NO_REPLICA)])
def test_nothing_hops_without_a_next_model_or_after_the_first_byte_or_the_deadline(error: ServeAppError) -> None:
    assert reason(error, "old") is None
    assert reason(error, has_answer=True) is None
    assert reason(error, deadline=10.0) is None
    assert reason(error, deadline=10.001) is not None


def test_the_models_come_in_order() -> None:
    hops = ModelHops(("old", "new", "last"))
    assert (hops.model, hops.has_next) == ("old", True)
    error = EngineFailed("died")
    assert (hops.leave(error), hops.model, hops.has_next) == ("new", "new", True)
    assert (hops.leave(error), hops.has_next) == ("last", False)
    with pytest.raises(IndexError):
        hops.leave(error)


def test_what_is_too_large_for_all_is_the_client_s_error_and_what_one_could_run_later_is_not() -> None:
    first, second = (BadRequest("the prompt is too long", code="context_length_exceeded") for _ in range(2))
    busy = refused(RefusalReason.QUEUE_FULL)
    broken = EngineFailed("died")
    for left, last, expected in (
        ((first,), second, first),
        ((busy,), second, busy),
        ((first, busy), second, busy),
        ((busy, broken), second, busy),
        ((first,), broken, broken),
        ((), second, second),
    ):
        hops = ModelHops(["a", "b", "c"])
        for error in left:
            hops.leave(error)
        assert hops.last_error(last) is expected
