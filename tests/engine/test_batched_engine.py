"""Requests run in batches in front of an engine, and none is lost, left behind or kept waiting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from serve_app.core.batching import BatchPolicy, padding_ratio
from serve_app.engine.batched_engine import batch_item
from serve_app.errors import EngineFailed, EngineUnreachable, Overloaded
from serve_app.transport import Frame, Submit
from serve_app.types import Operation
from tests.engine.batched import Replica, answer, ask, run
from tests.fakes.timed_engine import DIED, TimedEngine, submit
from tests.fakes.until import turns

THREE = BatchPolicy(3)  # waits until it is full
QUICK = BatchPolicy(3, 0.5)  # for half a second at most


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


def test_a_batch_starts_together_once_it_is_full() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        first = ask(engine, submit(1), submit(2))
        await asyncio.sleep(5.0)  # made up
        assert inner.began == {}
        assert engine.load().waiting == 2
        await asyncio.gather(*first, *ask(engine, submit(3)))
        assert inner.began == {1: 5.0, 2: 5.0, 3: 5.0}

    run(THREE, scenario)


def test_requests_of_a_batch_reach_the_engine_in_the_order_in_which_they_came() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        await asyncio.gather(*ask(engine, *(submit(number) for number in (7, 3, 5))))
        assert list(inner.began) == [7, 3, 5]

    run(THREE, scenario)


def test_a_batch_that_is_not_full_starts_when_its_oldest_request_has_waited_long_enough() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        first = ask(engine, submit(1))
        await asyncio.sleep(0.25)  # made up
        await asyncio.gather(*first, *ask(engine, submit(2)))
        assert inner.began == {1: 0.5, 2: 0.5}

    run(QUICK, scenario)


def test_the_next_batch_starts_only_after_the_last_request_of_the_one_before() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        seconds = (1.0, 4.0, 2.0, 1.0, 1.0, 1.0)
        await asyncio.gather(*ask(engine, *(submit(number, s) for number, s in enumerate(seconds))))
        assert list(inner.began.values()) == [0.0] * 3 + [4.0] * 3

    run(THREE, scenario)


def test_a_continuous_policy_starts_a_request_as_soon_as_another_has_ended() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        seconds = (1.0, 3.0, 1.0, 1.0)
        await asyncio.gather(*ask(engine, *(submit(number, s) for number, s in enumerate(seconds))))
        assert list(inner.began.values()) == [0.0, 0.0, 1.0, 2.0]

    run(BatchPolicy(2, is_continuous=True), scenario)


def test_a_waiting_request_whose_client_leaves_leaves_the_batch() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        left, *stay = ask(engine, submit(1), submit(2))
        await turns()
        await cancel(left)
        assert engine.load().waiting == 1
        await asyncio.gather(*stay, *ask(engine, submit(3), submit(4)))
        assert list(inner.began) == [2, 3, 4]

    run(THREE, scenario)


def test_a_request_cancelled_as_its_batch_starts_is_never_run_and_the_batch_goes_on() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        first, second = ask(engine, submit(1), submit(2))
        await turns()
        (third,) = ask(engine, submit(3))
        await turns(1)  # it has arrived, and the batch has started: its requests run in the next turn
        first.cancel()
        await asyncio.gather(second, third)
        assert first.cancelled()
        assert list(inner.began) == [2, 3]
        await asyncio.gather(*ask(engine, submit(4), submit(5), submit(6)))

    run(THREE, scenario)


def test_a_batch_whose_request_is_cancelled_goes_on_without_it() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        first, *others = ask(engine, submit(1, 9.0), submit(2, 2.0), submit(3, 3.0))
        following = ask(engine, submit(4), submit(5), submit(6))
        await asyncio.sleep(1.0)  # made up
        await cancel(first)
        assert inner.aborted == [1]
        await asyncio.gather(*others, *following)
        assert inner.began[4] == 3.0

    run(THREE, scenario)


def test_a_request_that_fails_ends_alone() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        failing, *others = ask(engine, submit(1, fails=True), submit(2, 2.0), submit(3))
        following = ask(engine, submit(4), submit(5), submit(6))
        with pytest.raises(EngineFailed, match="this request failed"):
            await failing
        await asyncio.gather(*others, *following)
        assert inner.began[4] == 2.0

    run(THREE, scenario)


def test_all_that_wait_for_an_engine_that_dies_can_run_elsewhere() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        running = ask(engine, submit(1, 9.0), submit(2, 9.0), submit(3, 9.0))
        waiting = ask(engine, submit(4), submit(5), submit(6), submit(7))
        await asyncio.sleep(1.0)  # made up
        inner.die()
        errors = await asyncio.gather(*running, *waiting, return_exceptions=True)
        assert [type(error) for error in errors] == [EngineFailed] * 3 + [EngineUnreachable] * 4
        assert [str(error) for error in errors[:3]] == [DIED] * 3
        with pytest.raises(EngineUnreachable):
            await answer(engine, submit(8))

    run(THREE, scenario)


def test_a_request_that_waits_on_an_idle_engine_ends_when_the_engine_is_given_up() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        waiting = ask(engine, submit(1), submit(2))
        await turns()
        engine.fail()
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, EngineUnreachable)
        assert inner.began == {}

    run(THREE, scenario)


def test_without_a_policy_the_engines_own_iterator_is_returned() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        made: list[AsyncGenerator[Frame, None]] = []
        run_inside = inner.run

        def kept(asked: Submit) -> AsyncGenerator[Frame, None]:
            made.append(run_inside(asked))
            return made[-1]

        inner.run = kept  # type: ignore[method-assign]
        frames = engine.run(submit(1))
        assert frames is made[0]
        assert [frame.body async for frame in frames] == [b"first", b"last"]

    run(None, scenario)


def test_work_that_takes_no_slot_never_waits() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        (waits,) = ask(engine, submit(1))
        for number, operation in enumerate(one for one in Operation if not one.takes_slot):
            await answer(engine, submit(10 + number, 0.0, operation))
        assert 1 not in inner.began
        await cancel(waits)

    run(THREE, scenario)


def test_a_request_above_the_bound_is_refused_as_overload() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        waiting = ask(engine, submit(1), submit(2))
        await turns()
        (frame,) = await answer(engine, submit(3))
        assert frame.status == Overloaded.status
        error = json.loads(frame.body)["error"]
        assert error["code"] == Overloaded.code
        assert error["message"].endswith("is full: 2 of 2 requests wait")
        assert frame.usage is not None
        engine.set_policy(BatchPolicy(1))
        await asyncio.gather(*waiting)

    run(BatchPolicy(3, max_queued=2), scenario)


def test_a_request_that_had_a_replica_before_is_refused_by_no_bound() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        waiting = ask(engine, submit(1), submit(2))
        await turns()
        again = msgspec.structs.replace(submit(3), accepted=True)
        assert next(frame.status for frame in await answer(engine, again)) == 200
        await asyncio.gather(*waiting)

    run(BatchPolicy(3, max_queued=2), scenario)


def test_a_smaller_bound_refuses_none_of_those_that_wait_already() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        running = ask(engine, submit(1))
        await turns()
        engine.set_policy(BatchPolicy(3))
        waiting = ask(engine, *map(submit, (2, 3, 4, 5)))
        await turns()
        engine.set_policy(BatchPolicy(5, max_wait_s=50.0, max_queued=2))
        answers = await asyncio.gather(*running, *waiting)
        assert [frames[0].status for frames in answers] == [200] * 5

    run(BatchPolicy(1), scenario)


def test_closing_starts_what_waits_and_refuses_what_comes() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        waiting = ask(engine, *(submit(number) for number in range(5)))
        await turns()
        engine.close()
        with pytest.raises(EngineUnreachable):
            await answer(engine, submit(9))
        await asyncio.gather(*waiting)
        assert list(inner.began.values()) == [0.0] * 3 + [1.0] * 2

    run(THREE, scenario)


def test_a_changed_policy_is_that_of_later_requests_after_the_batches_of_the_former_one() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        former = ask(engine, *(submit(number, 2.0) for number in range(4)))
        await turns()
        engine.set_policy(BatchPolicy(2))
        later = ask(engine, *(submit(number) for number in range(4, 7)))
        await turns()
        engine.close()  # the last one has no partner
        await asyncio.gather(*former, *later)
        assert list(inner.began.values()) == [0.0] * 3 + [2.0] + [4.0] * 2 + [5.0]

    run(THREE, scenario)


def test_a_request_that_waits_for_a_change_of_the_policy_can_be_cancelled() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        former = ask(engine, submit(1), submit(2), submit(3))
        await turns()
        engine.set_policy(BatchPolicy(1))
        left, stays = ask(engine, submit(4), submit(5))
        await turns()
        await cancel(left)
        await asyncio.gather(*former, stays)
        assert list(inner.began) == [1, 2, 3, 5]

    run(THREE, scenario)


def test_without_a_policy_any_more_everything_starts_and_the_engine_batches_again() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        former = ask(engine, submit(1, 5.0))
        await turns()
        engine.set_policy(QUICK)
        held = ask(engine, submit(2))
        await turns()
        engine.set_policy(None)
        await asyncio.gather(*held, *ask(engine, submit(3)))
        assert inner.began == {1: 0.0, 2: 0.0, 3: 0.0}
        engine.set_policy(QUICK)
        await asyncio.gather(*former, *ask(engine, submit(4)))
        assert inner.began[4] == 5.5  # in a batch of the new policy, after those of the old one

    run(THREE, scenario)


def test_the_load_has_the_sizes_the_waits_and_the_padding_of_batches() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        first = ask(engine, submit(1, tokens=2), submit(2, tokens=12))
        await asyncio.sleep(0.3)  # made up
        await asyncio.gather(*first, *ask(engine, submit(3, tokens=32)))
        await asyncio.gather(*ask(engine, submit(4, tokens=2)))
        load = engine.load()
        assert load.batch_size == 2.0
        assert load.batch_wait_s == pytest.approx((0.3 + 0.3 + 0.0 + 0.5) / 4)
        assert load.padding_ratio == pytest.approx(padding_ratio([10, 20, 40]) / 2)  # of two batches, one alone
        assert (load.batches, load.batched_requests) == (2, 4)

    run(QUICK, scenario)


def test_a_request_that_was_cut_off_counts_for_no_padding() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        failing, *others = ask(engine, submit(1, fails=True), submit(2, tokens=12), submit(3, tokens=12))
        await asyncio.gather(failing, *others, return_exceptions=True)
        assert engine.load().padding_ratio == 0.0

    run(THREE, scenario)


def test_where_the_engine_batches_itself_its_steps_are_the_batches_of_the_last_ten_seconds() -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        second = inner.figures
        for number in range(30):
            size = 2 if number < 20 else 6
            second = type(second)(
                steps=second.steps + 10,
                sequence_steps=second.sequence_steps + 10 * size,
                generated_tokens=second.generated_tokens + 10 * size,
                prompt_tokens=second.prompt_tokens + 5,
            )
            inner.figures = second
            await asyncio.sleep(1.0)  # made up
        load = engine.load()
        assert load.batch_size == pytest.approx(6.0)
        assert load.tokens_per_s == pytest.approx(65.0)
        assert (load.padding_ratio, load.batch_wait_s, load.batches) == (0.0, 0.0, 0)

    run(None, scenario)


def test_an_unknown_prompt_counts_by_the_bytes_of_its_body() -> None:
    unknown = Submit(1, "id", Operation.CHAT, {"text": "x" * 400})
    assert 100 <= batch_item("a", unknown).prompt_tokens <= 110
    known = Submit(1, "id", Operation.CHAT, {"text": "x" * 400}, prompt_tokens=7, output_tokens=9)
    assert (batch_item("a", known).prompt_tokens, batch_item("a", known).output_tokens) == (7, 9)
