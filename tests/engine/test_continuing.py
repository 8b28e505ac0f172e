"""A continued stream at the serving objects: outputs of earlier runs first, their events dropped, then the new ones."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Coroutine
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.continuation import ContinuedRuns
from serve_app.engine.token_recorder import TokenRecorder, recorder_of_request
from serve_app.errors import EngineFailed
from serve_app.transport import NOT_CONTINUABLE, Frame, Submit, TokenUsage, Unsent
from serve_app.types import Operation
from tests.effort import examples
from tests.requires import requires

requires("vllm")

from vllm.utils.async_utils import merge_async_iterators  # noqa: E402 - after `requires`

from serve_app.engine.vllm_adapter import continuing  # noqa: E402
from serve_app.engine.vllm_adapter.engine import answer_frames  # noqa: E402
from serve_app.engine.vllm_adapter.produced_tokens import PRODUCED  # noqa: E402

BODY = {"model": "m", "stream": True}


def output(choice: int, *tokens: int, ends: str | None = None) -> Any:
    made = SimpleNamespace(index=choice, token_ids=list(tokens), finish_reason=ends, logprobs=None, text="")
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], num_cached_tokens=2, outputs=[made])


async def source(outputs: list[Any], *, turns: int = 0) -> AsyncGenerator[Any, None]:
    for item in outputs:
        for _ in range(turns):
            await asyncio.sleep(0)
        yield item


def frames(groups: list[list[int]], events: int, outputs: list[Any], *texts: str) -> list[Frame]:
    """The frames of a stream of one event per output, then `texts`."""
    asked = Submit(1, "r", Operation.COMPLETION, BODY, groups=groups, events=events)
    recorder = TokenRecorder(1, (), continued=ContinuedRuns(asked, 1))

    async def written() -> AsyncGenerator[str, None]:
        async for item in recorder.record(source(outputs), "r"):
            yield f"data: {item.outputs[0].token_ids}\n\n"
        for text in texts:
            yield text

    async def start() -> AsyncGenerator[str, None]:
        return written()

    async def collect() -> list[Frame]:
        return [frame async for frame in answer_frames(start, recorder, asked)]

    return asyncio.run(collect())


def test_a_continued_stream_sends_and_counts_what_is_new() -> None:
    outputs = [output(0, 5), output(0, 6, 7), output(0, 8), output(0, 9, ends="length")]
    first, second, third, last = frames([[0, 5], [0, 6, 7]], 2, outputs, "data: [DONE]\n\n")
    assert (first.status, first.media, first.body) == (200, "sse", b"data: [8]\n\n")
    assert (second.status, second.body, third.body) == (0, b"data: [9]\n\n", b"data: [DONE]\n\n")
    assert [frame.groups for frame in (first, second, third, last)] == [[[0, 8]], [[0, 9]], [], []]
    assert [frame.events for frame in (first, second, third)] == [1, 1, 1]
    assert last.usage == TokenUsage(3, 5, 2, "length")


def test_a_stream_whose_choices_have_all_ended_gets_its_last_events() -> None:
    first, last = frames([[0, 5], [0, 6]], 2, [output(0, 5), output(0, 6, ends="stop")], "data: [DONE]\n\n")
    assert (first.status, first.body) == (200, b"data: [DONE]\n\n")
    assert last.usage == TokenUsage(3, 2, 2, "stop")


@pytest.mark.parametrize(
    ("groups", "events", "outputs"),
    [
        ([[0, 5], [0, 6]], 1, [output(0, 5), output(0, 6), output(0, 7)]),
        ([[0, 5], [0, 6]], 3, [output(0, 5), output(0, 6), output(0, 7)]),
        ([[0, 5], [0, 6]], 3, [output(0, 5), output(0, 6, ends="stop")]),
        ([[0, 5], [1, 6]], 2, [output(0, 5), output(0, 7)]),
        ([[0, 5]], 1, [output(0, 5), output(0, ends="error")]),
    ],
    ids=["too_few_events", "too_many_events", "too_many_events_of_all", "another_prompt", "refused_by_the_engine"],
)
def test_a_count_that_does_not_come_out_is_no_answer(groups: Any, events: int, outputs: Any) -> None:
    with pytest.raises(EngineFailed) as failed:
        frames(groups, events, outputs)
    assert failed.value.code == NOT_CONTINUABLE


def test_an_error_while_the_beginning_is_made_again_is_no_answer() -> None:
    with pytest.raises(EngineFailed) as failed:
        frames([[0, 5]], 2, [], 'data: {"error": {"message": "x", "type": "y", "param": null, "code": 400}}\n\n')
    assert failed.value.code == NOT_CONTINUABLE


@settings(max_examples=examples(60), deadline=None)
@given(
    continued=st.lists(st.integers(0, 2), max_size=9),
    new=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    turns=st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_new_outputs_of_one_prompt_wait_for_the_earlier_ones_of_all(
    continued: list[int], new: list[int], turns: list[int]
) -> None:
    groups = [[prompt, number] for number, prompt in enumerate(continued)]
    asked = Submit(1, "r", Operation.COMPLETION, BODY, groups=groups, events=len(groups))
    runs = ContinuedRuns(asked, 1)
    recorder = TokenRecorder(1, (), continued=runs)

    async def scenario() -> list[tuple[int, int]]:
        recorder_of_request.set(recorder)
        outputs = [
            [output(0, *tokens) for _, *tokens in runs.groups_of(prompt)]
            + [output(0, 100 + n) for n in range(new[prompt])]
            for prompt in range(3)
        ]
        merge = functools.partial(continuing.recorded_merge, merge_async_iterators)
        merged = merge(*(recorder.record(source(outputs[p], turns=turns[p]), f"r-{p}") for p in range(3)))
        found = []
        async for prompt, item in merged:
            if not runs.is_over:
                runs.drop_event()
            found.append((prompt, item.outputs[0].token_ids[0]))
        return found

    found = asyncio.run(scenario())
    assert found[: len(groups)] == [(prompt, number) for prompt, number in groups]
    assert recorder.take_groups() == [[prompt, token] for prompt, token in found[len(groups) :]]
    assert len(found) == len(groups) + sum(new)
    assert recorder.usage().completion_tokens == len(found)


def test_ids_and_times_are_those_of_the_request_in_each_run() -> None:
    def drawn(request: str, created: int) -> list[Any]:
        continuing.identity_of_request.set(continuing.AnswerIdentity(request, created))
        return [continuing.answer_uuid(), continuing.answer_uuid(), continuing.AnswerTime().time()]

    async def scenario() -> None:
        runs = [drawn("r", 5), drawn("r", 5), drawn("s", 6)]
        assert runs[0] == runs[1]
        assert len({*runs[0][:2], *runs[2][:2]}) == 4
        assert [run[2] for run in runs] == [5, 5, 6]

    asyncio.run(scenario())
    assert continuing.answer_uuid() != continuing.answer_uuid()
    assert continuing.AnswerTime().time() > 6
    assert continuing.AnswerTime().monotonic() > 0


def engine_with(*states: Any) -> Any:
    requests = {f"internal-{number}": state for number, state in enumerate(states)}
    return SimpleNamespace(output_processor=SimpleNamespace(request_states=requests))


def state(tokens: int, request: str = "r", *, logprobs: int | None = None, prompt_logprobs: int | None = None) -> Any:
    return SimpleNamespace(
        external_req_id=request,
        prompt_len=7,
        num_cached_tokens=4,
        detokenizer=SimpleNamespace(output_token_ids=list(range(100, 100 + tokens))),
        logprobs_processor=SimpleNamespace(num_logprobs=logprobs, num_prompt_logprobs=prompt_logprobs),
    )


def recorder_of(*requests: str, choices: int = 1, continued: list[list[int]] | None = None) -> TokenRecorder:
    asked = Submit(1, "r", Operation.CHAT, {}, groups=continued or [])
    recorder = TokenRecorder(choices, (), continued=None if continued is None else ContinuedRuns(asked, choices))
    for request in requests:
        recorder.record(source([]), request)
    return recorder


@pytest.mark.parametrize(("continued", "first"), [(None, 0), ([[0, 100], [0, 101, 102]], 3)], ids=["first", "next"])
def test_a_running_whole_answer_tells_what_this_run_has_produced(continued: Any, first: int) -> None:
    groups, prompt = continuing.produced(
        engine_with(state(9, "other"), state(150)), recorder_of("r", continued=continued)
    )
    assert [token for _, *tokens in groups for token in tokens] == list(range(100 + first, 250))
    assert {group[0] for group in groups} == {0}
    assert max(len(group) for group in groups) == 1 + continuing.GROUP_TOKENS
    assert prompt == TokenUsage(7, 0, 4)


@pytest.mark.parametrize(
    ("states", "recorder"),
    [
        ([], recorder_of("r")),
        ([state(9, "other")], recorder_of("r")),
        ([state(9), state(9)], recorder_of("r", choices=2)),
        ([state(9)], recorder_of("r", choices=2)),
        ([state(9), state(9, "r-1")], recorder_of("r", "r-1")),
        ([state(9)], recorder_of()),
        ([state(9, logprobs=0)], recorder_of("r")),
        ([state(9, prompt_logprobs=0)], recorder_of("r")),
    ],
    ids=["ended", "others", "choices", "choice", "prompts", "not_begun", "logprobs", "prompt_logprobs"],
)
def test_what_could_not_be_taken_on_is_not_reported(states: list[Any], recorder: TokenRecorder) -> None:
    assert continuing.produced(engine_with(*states), recorder) == Unsent([])


class ScriptedEngine:
    """An `AsyncLLM` whose output processor gives `outputs`, one for each of EngineCore's, and a request's queue."""

    def __init__(self, *outputs: Any) -> None:
        self.made = list[Any]()
        self.outputs = list(outputs)
        self.sent = list[Any]()
        self.ready: Any = None
        self.request_id = "r"
        self.request_states = {"r": SimpleNamespace(is_prefilling=False)}
        self.output_processor = self.engine_core = self
        self.model_config = SimpleNamespace(max_model_len=99)
        self.turns = continuing.ContinuedTurns()

    def close(self) -> None:
        pass

    def process_outputs(self, outputs: list[Any]) -> None:
        self.made += [one.new_token_ids for one in outputs]
        self.ready = self.outputs.pop(0)
        if self.ready is not None:
            self.request_states.clear()

    def get_nowait(self) -> Any:
        return self.ready

    async def get(self) -> Any:
        return "new"

    async def add_request_async(self, request: Any) -> None:
        self.sent.append(request)


def queue_of(engine: ScriptedEngine, groups: list[list[int]], events: int) -> continuing.ContinuedQueue:
    params = SimpleNamespace(num_logprobs=None, extra_args=None)
    continued = ContinuedRuns(Submit(1, "r", Operation.CHAT, {}, groups=groups, events=events), 1)
    request = SimpleNamespace(request_id="r", sampling_params=params)
    return continuing.ContinuedQueue(engine, engine, [request], groups, continued)


def unended(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Its result, while no choice has ended."""
    not_ended = mock.patch("vllm.v1.core.sched.utils.check_stop", return_value=False)
    with mock.patch("vllm.v1.request.Request.from_engine_core_request"), not_ended:
        return asyncio.run(coroutine)


def first_output(engine: ScriptedEngine, groups: list[list[int]], events: int) -> Any:
    return unended(queue_of(engine, groups, events).get())


def test_a_whole_answer_has_no_output_until_it_continues_with_all_that_was_produced() -> None:
    engine = ScriptedEngine(None, None, None)
    assert first_output(engine, [[0, 5], [0, 6, 7], [0, 8]], 0) == "new"
    assert engine.made == [[5], [6, 7], [8]]
    (request,) = engine.sent
    assert request.sampling_params.extra_args == {PRODUCED: [5, 6, 7, 8]}
    assert engine.request_states["r"].is_prefilling


def test_a_whole_answer_that_had_ended_is_given_without_the_engine() -> None:
    engine = ScriptedEngine(None, "whole")
    assert first_output(engine, [[0, 5], [0, 6]], 0) == "whole"
    assert engine.sent == []


def test_a_stream_has_an_output_for_each_group() -> None:
    with pytest.raises(EngineFailed) as failed:
        first_output(ScriptedEngine(None, None), [[0, 5], [0, 6]], 2)
    assert failed.value.code == NOT_CONTINUABLE


class LongEngine(ScriptedEngine):
    """Makes an output of each group; `others` are what it shares the replica with."""

    def __init__(self, turns: continuing.ContinuedTurns, others: list[LongEngine]) -> None:
        super().__init__()
        self.turns = turns
        self.others = others
        self.made_by_others = list[int]()

    def process_outputs(self, outputs: list[Any]) -> None:
        self.made += [one.new_token_ids for one in outputs]
        self.ready = "made"

    async def add_request_async(self, request: Any) -> None:
        self.made_by_others = [len(other.made) for other in self.others if other is not self]
        self.sent.append(request)


@pytest.mark.parametrize("lengths", [[500, 500, 500], [900, 300, 70], [70, 900, 300]])
def test_streams_of_a_dead_engine_reach_this_one_one_after_the_other_the_shortest_first(lengths: list[int]) -> None:
    async def read(queue: continuing.ContinuedQueue) -> None:
        while (queue.get_nowait() or await queue.get()) != "new":
            pass

    async def all_of_them() -> None:
        groups = ([[0, token] for token in range(length)] for length in lengths)
        queues = [queue_of(engine, one, len(one)) for engine, one in zip(engines, groups, strict=True)]
        cut = asyncio.create_task(read(queue_of(LongEngine(engines[0].turns, []), [[0, 1]] * 500, 500)))
        async with asyncio.TaskGroup() as group:
            for queue in queues:
                group.create_task(read(queue))
            await asyncio.sleep(0)  # one client leaves while its stream waits for its turn
            cut.cancel()

    engines = list[LongEngine]()
    turns = continuing.ContinuedTurns()
    engines += [LongEngine(turns, engines) for _ in lengths]
    unended(all_of_them())

    assert [len(engine.made) for engine in engines] == lengths
    first, second, last = sorted(engines, key=lambda engine: sum(engine.made_by_others))
    assert [len(one.made) for one in (first, second, last)] == sorted(lengths)
    # each of the others had had one turn at most before anybody's count was known
    assert all(made <= continuing.TURN_GROUPS for made in first.made_by_others)
    assert last.made_by_others == [len(engine.made) for engine in engines if engine is not last]


def begun(external_id: str, *, prefills: bool) -> Any:
    return SimpleNamespace(external_req_id=external_id, is_prefilling=prefills, prompt_len=9, num_cached_tokens=4)


def test_a_whole_answer_tells_its_first_token_once() -> None:
    whole = TokenRecorder(2, (), awaits_first_token=True)
    streamed = TokenRecorder(1, ())
    whole.prompts["cmpl-whole-0"] = streamed.prompts["cmpl-streamed-0"] = 0
    states = {"1": begun("cmpl-whole-0", prefills=True), "2": begun("cmpl-streamed-0", prefills=False)}
    states["3"] = begun("cmpl-of-a-request-that-has-ended", prefills=False)
    llm = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    recorders = {"whole": whole, "streamed": streamed}
    assert list(continuing.first_tokens(llm, recorders)) == []
    states |= {"1": begun("cmpl-whole-0", prefills=False), "4": begun("cmpl-whole-0", prefills=False)}
    assert list(continuing.first_tokens(llm, recorders)) == [("whole", TokenUsage(9, 0, 4))]
    assert list(continuing.first_tokens(llm, recorders)) == []
