"""How a run of a request ends, decided from what happened; and what that leaves to the next run."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.core.continuation import NotContinued
from serve_app.errors import EngineFailed, EngineUnreachable, NotFound, Overloaded, ServeAppError
from serve_app.router import runs
from serve_app.router.runs import LossLimit, RequestRuns, RunEnd, RunResult
from serve_app.transport import NOT_CONTINUABLE, STOPPED, ResponseStream, Submit, UnreadBytes
from serve_app.types import Operation

ASKED = Submit(1, "r", Operation.COMPLETION, {"prompt": "a b", "stream": True})
LOST = EngineFailed("died")
AWAY = EngineUnreachable("away")
STOP = EngineFailed("stopped", code=STOPPED)
REFUSED = EngineFailed("another model", code=NOT_CONTINUABLE)


def stream(error: ServeAppError | None, *, seen: bool, is_whole: bool = True) -> ResponseStream:
    """A run of which the client has `seen` a part, with two tokens in one event."""
    found = ResponseStream(UnreadBytes(), lambda: None, lambda: None)
    found.produced.add([[0, 1, 2]], 1)
    found.produced.is_whole = is_whole
    found.client_has_seen = seen
    if error is not None:
        found.fail(error)
    return found


def of_request(to_continue: ResponseStream | None = None, body: dict[str, Any] = ASKED.body) -> RequestRuns:
    found = RequestRuns(to_continue=to_continue)
    found.begin(Submit(1, "r", Operation.RESPONSES if "include" in body else ASKED.operation, body))
    return found


def limit(*, lost: int = 0) -> LossLimit:
    found = LossLimit(max_wait_s=60.0, started=0.0)
    for _ in range(lost):
        found.count(LOST, 0.0)
    return found


def end(
    error: ServeAppError | None,
    run: ResponseStream | None,
    of: RequestRuns | None = None,
    *,
    losses: int = 0,
    now: float = 0.0,
    continues: bool = True,
) -> RunResult:
    return (of or of_request()).result(error, run, limit(lost=losses), now, engines_continue=continues)


def test_a_run_without_an_error_has_answered_its_request() -> None:
    assert end(None, stream(None, seen=True)) == (RunEnd.ANSWERED, None, None, None)


@pytest.mark.parametrize("seen", [True, False])
def test_a_run_that_its_router_has_stopped_is_no_loss_however_many_there_were(seen: bool) -> None:
    assert end(STOP, stream(STOP, seen=seen), losses=9, continues=False).end is RunEnd.STOPPED


@pytest.mark.parametrize(("error", "run"), [(LOST, stream(LOST, seen=False)), (LOST, None), (AWAY, None)])
@pytest.mark.parametrize("continues", [True, False])
def test_a_request_whose_client_has_nothing_runs_again_whatever_the_engines_can_do(
    error: ServeAppError, run: ResponseStream | None, continues: bool
) -> None:
    assert end(error, run, continues=continues).end is RunEnd.RESTARTS


@pytest.mark.parametrize("was_seen_before", [True, False])
def test_a_request_of_which_the_client_has_a_part_in_this_run_or_an_earlier_one_is_continued(
    was_seen_before: bool,
) -> None:
    before = stream(LOST, seen=True) if was_seen_before else None
    run = stream(LOST, seen=not was_seen_before)
    found = end(LOST, run, of_request(before))
    assert (found.end, found.stream) == (RunEnd.CONTINUES, before or run)


def test_an_error_of_the_client_or_of_this_router_ends_the_request() -> None:
    slow = EngineFailed("the client reads too slowly", code="slow_client")
    assert end(slow, stream(slow, seen=True)).end is RunEnd.FAILED
    ours = EngineFailed("while its answer was sent")
    assert end(ours, stream(None, seen=True)).end is RunEnd.FAILED
    assert end(NotFound("gone"), None).end is RunEnd.FAILED


@pytest.mark.parametrize(
    ("why", "error", "happened"),
    [
        (NotContinued.REFUSED, REFUSED, {}),
        (NotContinued.ENGINE, LOST, {"continues": False}),
        (NotContinued.LOSSES, LOST, {"losses": runs.MAX_LOSSES - 1}),
        (NotContinued.LOSSES, AWAY, {"now": 60.0}),
    ],
)
def test_a_request_that_cannot_be_continued_fails_and_says_why(
    why: NotContinued, error: ServeAppError, happened: dict[str, Any]
) -> None:
    found = end(error, stream(error, seen=True), **happened)
    assert (found.end, found.error, found.not_continued) == (RunEnd.FAILED, error, why)


def test_neither_a_request_that_only_its_engine_could_finish_nor_one_too_long_is_continued() -> None:
    alone = of_request(body={"include": ["message.output_text.logprobs"]})
    assert end(LOST, stream(LOST, seen=True), alone).not_continued is NotContinued.REQUEST
    assert end(LOST, stream(LOST, seen=True, is_whole=False)).not_continued is NotContinued.TOO_LONG


def test_to_decide_how_a_run_has_ended_changes_nothing() -> None:
    of = of_request()
    bound = limit(lost=1)
    for _ in range(9):
        assert of.result(LOST, stream(LOST, seen=True), bound, 0.0, engines_continue=True).end is RunEnd.CONTINUES
    assert (of.to_continue, of.trace.losses, bound.engines_lost) == (None, 0, 1)


def test_a_request_under_which_engines_die_is_not_tried_for_ever() -> None:
    assert [end(LOST, None, losses=losses).end for losses in range(runs.MAX_LOSSES)] == [
        *[RunEnd.RESTARTS] * (runs.MAX_LOSSES - 1),
        RunEnd.FAILED,
    ]


def test_the_wait_for_another_engine_counts_from_the_loss_however_old_the_request_is() -> None:
    bound = limit()
    assert not bound.is_last(LOST, 3600.0)
    bound.count(LOST, 3600.0)
    bound.count(AWAY, 3630.0)  # an engine that never had the request only costs time
    assert not bound.is_last(AWAY, 3659.0)
    assert bound.is_last(AWAY, 3660.0)


def test_a_run_begins_with_what_the_one_before_has_produced_and_a_first_one_with_nothing() -> None:
    of = RequestRuns()
    assert of.begin(ASKED) == ASKED
    of.on_lost(RunResult(RunEnd.CONTINUES, LOST, stream(LOST, seen=True)), limit(), 1.0)
    again = of.begin(ASKED)
    assert (again.groups, again.events, again.accepted) == ([[0, 1, 2]], 1, True)


def test_a_request_that_no_engine_of_its_model_may_continue_begins_anew_if_its_client_has_nothing() -> None:
    of = of_request(stream(STOP, seen=False))
    of.on_lost(RunResult(RunEnd.RESTARTS, REFUSED), limit(), 1.0)
    assert of.to_continue is None
    queue_refusal = Overloaded("no engine of its model", code=NOT_CONTINUABLE)
    of = of_request(stream(STOP, seen=False))
    assert of.on_refused(queue_refusal, STOP) is None
    assert of.to_continue is None


def test_a_refusal_of_the_queue_is_the_clients_unless_it_has_a_part_which_has_then_lost_its_engine() -> None:
    full = Overloaded("full")
    assert of_request().on_refused(full, None) is full
    begun = of_request(stream(LOST, seen=True))
    broken = begun.on_refused(full, LOST)
    assert isinstance(broken, EngineFailed)
    assert (broken.code, broken.message.rpartition(": ")[2], broken.reason) == (LOST.code, "full", "died")
    assert begun.trace.not_continued is NotContinued.QUEUE
    other = Overloaded("no engine of its model", code=NOT_CONTINUABLE)
    assert begun.on_refused(other, LOST) is other
    assert begun.trace.not_continued is NotContinued.ENGINE


def test_the_gap_of_an_interrupted_stream_counts_from_its_first_loss_to_its_next_frame() -> None:
    of = of_request()
    for now in (1.0, 3.0):
        of.on_lost(RunResult(RunEnd.CONTINUES, LOST, stream(LOST, seen=True)), limit(), now)
    of.trace.replica_id = "r2"
    of.on_first_frame(4.0)
    of.on_first_frame(9.0)
    assert (of.trace.continued, of.trace.losses) == ((("r2", 3.0),), 2)
