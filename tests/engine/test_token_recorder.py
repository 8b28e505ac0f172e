"""Token groups and usage are noted on their way to the serving objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.engine.continuation import ContinuedRuns
from serve_app.engine.token_recorder import TokenRecorder
from serve_app.errors import EngineFailed
from serve_app.transport import Submit, TokenUsage
from serve_app.types import Operation


class EngineDied(Exception):
    pass


def output(*choices: tuple[int, list[int]], prompt: int = 3, cached: int = 0, ends: str | None = None) -> Any:
    return SimpleNamespace(
        prompt_token_ids=list(range(prompt)),
        num_cached_tokens=cached,
        outputs=[
            SimpleNamespace(index=index, text="", token_ids=ids, finish_reason=ends, logprobs=None)
            for index, ids in choices
        ],
    )


async def source(*outputs: Any, error: Exception | None = None) -> AsyncGenerator[Any, None]:
    for item in outputs:
        yield item
    if error is not None:
        raise error


def test_groups_are_there_before_the_consumer_sees_the_output() -> None:
    async def scenario() -> list[list[list[int]]]:
        recorder = TokenRecorder(1, (EngineDied,))
        return [recorder.take_groups() async for _ in recorder.record(source(output((0, [7])), output((0, [8, 9]))))]

    assert asyncio.run(scenario()) == [[[0, 7]], [[0, 8, 9]]]


def test_choices_of_the_second_prompt_follow_those_of_the_first_whoever_runs_first() -> None:
    async def scenario() -> list[list[int]]:
        recorder = TokenRecorder(2, (EngineDied,))
        first = recorder.record(source(output((0, [1]), (1, [2]))))
        second = recorder.record(source(output((0, [3]), (1, [4]))))
        for outputs in (second, first):
            async for _ in outputs:
                pass
        return recorder.take_groups()

    assert asyncio.run(scenario()) == [[2, 3], [3, 4], [0, 1], [1, 2]]


def test_an_output_of_which_the_engine_says_that_it_ended_it_is_a_failure_and_no_answer() -> None:
    async def scenario() -> TokenRecorder:
        recorder = TokenRecorder(1, (EngineDied,))
        with pytest.raises(EngineFailed):
            async for _ in recorder.record(source(output((0, [7])), output((0, []), ends="abort"))):
                pass
        return recorder

    recorder = asyncio.run(scenario())
    assert recorder.failed is not None
    assert recorder.take_groups() == [[0, 7]]


def test_usage_sums_prompts_and_counts_each_prompt_once() -> None:
    async def scenario() -> TokenUsage:
        recorder = TokenRecorder(1, (EngineDied,))
        for outputs in (
            recorder.record(source(output((0, [1]), cached=2), output((0, [2])))),
            recorder.record(source(output((0, [3]), prompt=5))),
        ):
            async for _ in outputs:
                pass
        return recorder.usage()

    assert asyncio.run(scenario()) == TokenUsage(prompt_tokens=8, completion_tokens=3, cached_tokens=2)


@pytest.mark.parametrize(("prompts", "dropped"), [([7, 2, 3], 7), ([9, 10], 0)])
def test_a_query_that_an_earlier_part_has_counted_is_not_counted_again(prompts: list[int], dropped: int) -> None:
    """Of two documents: an embedding model reads the query by itself, a cross-encoder with each of them."""

    async def scenario() -> TokenRecorder:
        recorder = TokenRecorder(1, (EngineDied,))
        for prompt in prompts:
            async for _ in recorder.record(source(output((0, [1]), prompt=prompt)), pooling=True):
                pass
        return recorder

    recorder = asyncio.run(scenario())
    assert recorder.drop_query(2) == dropped
    assert recorder.usage().prompt_tokens == sum(prompts) - dropped


@pytest.mark.parametrize(
    ("ends", "reported"), [(["stop"], "stop"), (["length", "stop"], "length"), (["stop", "length"], "length"), ([], "")]
)
def test_an_answer_that_was_cut_off_is_reported_whichever_choice_it_was(ends: list[str], reported: str) -> None:
    async def scenario() -> TokenUsage:
        recorder = TokenRecorder(2, (EngineDied,))
        async for _ in recorder.record(source(output((0, [1]), (1, [2])), *(output((0, []), ends=e) for e in ends))):
            pass
        return recorder.usage()

    assert asyncio.run(scenario()).finish_reason == reported


def test_a_broken_engine_is_remembered_and_other_errors_are_not() -> None:
    async def scenario(error: Exception) -> BaseException | None:
        recorder = TokenRecorder(1, (EngineDied,))
        with pytest.raises(type(error)):
            async for _ in recorder.record(source(output((0, [1])), error=error)):
                pass
        return recorder.failure

    assert isinstance(asyncio.run(scenario(EngineDied())), EngineDied)
    assert asyncio.run(scenario(ValueError("a client's mistake"))) is None


def test_leaving_early_closes_the_engine_side() -> None:
    closed = []

    async def engine() -> AsyncGenerator[Any, None]:
        try:
            while True:
                yield output((0, [1]))
        finally:
            closed.append(True)

    async def scenario() -> None:
        outputs = TokenRecorder(1, (EngineDied,)).record(engine())
        await anext(outputs)
        await outputs.aclose()

    asyncio.run(scenario())
    assert closed == [True]


def test_the_likeliest_tokens_come_first_whichever_was_sampled() -> None:
    """vLLM's serving objects take the first ones of a position for `top_logprobs`."""
    output_of_one = output((0, [9]))
    output_of_one.outputs[0].logprobs = [
        {9: SimpleNamespace(rank=70), 4: SimpleNamespace(rank=1), 5: SimpleNamespace(rank=2)}
    ]

    async def scenario() -> list[Any]:
        return [got async for got in TokenRecorder(1, ()).record(source(output_of_one))]

    (got,) = asyncio.run(scenario())
    assert list(got.outputs[0].logprobs[0]) == [4, 5, 9]


@pytest.mark.parametrize(("new", "groups"), [([8, 9], [[0, 8, 9]]), ([], [])], ids=["more", "no_more"])
def test_the_only_output_of_a_whole_answer_has_the_tokens_of_all_runs_and_the_new_ones_are_recorded(
    new: list[int], groups: list[list[int]]
) -> None:
    asked = Submit(1, "r", Operation.COMPLETION, {}, groups=[[0, 5], [0, 6, 7]], cached_tokens=2)
    continued = ContinuedRuns(asked, 1)
    assert not continued.is_stream

    async def scenario() -> TokenRecorder:
        recorder = TokenRecorder(1, (), continued=continued)
        async for _ in recorder.record(source(output((0, [5, 6, 7, *new]), cached=2, ends="stop"))):
            pass
        return recorder

    recorder = asyncio.run(scenario())
    assert recorder.take_groups() == groups
    assert recorder.usage() == TokenUsage(3, 3 + len(new), 2, "stop")
    assert continued.is_over
    assert recorder.failed is None
