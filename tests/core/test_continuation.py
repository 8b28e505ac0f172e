"""What is recorded of a stream over any number of runs is what one undisturbed run would have recorded."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core import continuation
from serve_app.core.continuation import GROUP_WORDS, NotContinued, Produced, is_preemptible, why_not_continued
from serve_app.types import Operation

groups = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6)  # a choice, and its tokens
messages = st.lists(st.tuples(st.lists(groups, max_size=3), st.integers(0, 4)), max_size=30)


@given(messages, st.lists(st.integers(0, 30), max_size=4))
def test_cut_anywhere_and_as_often_as_you_like_the_record_is_that_of_one_run(
    sent: list[tuple[list[list[int]], int]], cuts: list[int]
) -> None:
    record = Produced()
    borders = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    for start, end in itertools.pairwise(borders):
        # what the next engine is told is exactly what the client has, and it continues from there
        assert record.groups == [group for message, _ in sent[:start] for group in message]
        assert record.events == sum(events for _, events in sent[:start])
        for message, events in sent[start:end]:
            assert record.add(message, events) == sum(len(group) - 1 for group in message)
    assert record.groups == [group for message, _ in sent for group in message]
    assert record.tokens == sum(len(group) - 1 for group in record.groups)


def test_a_token_that_came_by_itself_is_recorded_in_twelve_bytes() -> None:
    record = Produced()
    for token in range(1000):
        record.add([[0, token]], 1)
    assert record.recorded_bytes == 1000 * 4 * (GROUP_WORDS + 1)


def test_the_record_of_a_stream_is_bounded_and_its_tokens_are_counted_on() -> None:
    record = Produced()
    with mock.patch.object(continuation, "MAX_WORDS", 30):
        for token in range(10):
            record.add([[0, token]], 1)
        assert record.is_whole
        record.add([[0, 10]], 1)
        assert not record.is_whole
        record.add([[0, 11]], 1)
    assert (record.groups, record.recorded_bytes, record.tokens, record.events) == ([], 0, 12, 12)


def test_what_only_the_first_engine_could_finish_is_not_continued() -> None:
    wanted = {"include": ["message.output_text.logprobs"]}
    assert why_not_continued(Operation.RESPONSES, wanted) is NotContinued.REQUEST
    assert why_not_continued(Operation.COMPLETION, {"use_beam_search": True}) is NotContinued.REQUEST
    for operation, body in (
        (Operation.RESPONSES, {"include": ["reasoning.encrypted_content"]}),
        (Operation.RESPONSES, {"include": "message"}),
        (Operation.CHAT, {"logprobs": True, "top_logprobs": 2}),
        (Operation.COMPLETION, wanted),
    ):
        assert why_not_continued(operation, body) is None


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({"engine_continues": False}, NotContinued.ENGINE),
        ({"is_same_model": False}, NotContinued.ENGINE),
        ({"is_recorded": False}, NotContinued.TOO_LONG),
        ({"engine_continues": True, "is_same_model": True, "is_recorded": True}, None),
    ],
)
def test_each_side_says_what_it_knows_of_the_engine_and_of_the_record(
    known: dict[str, bool], why: NotContinued | None
) -> None:
    assert why_not_continued(Operation.CHAT, {}, **known) is why


@pytest.mark.parametrize(
    ("operation", "body", "is_stream", "is_whole"),
    [
        (Operation.CHAT, {}, True, True),
        (Operation.CHAT, {"n": 1, "logprobs": False, "seed": 1, "temperature": 1.0}, True, True),
        (Operation.CHAT, {"n": 2}, True, False),
        (Operation.CHAT, {"logprobs": True}, True, False),
        (Operation.COMPLETION, {"logprobs": 0}, True, False),
        (Operation.COMPLETION, {"echo": True}, True, True),
        (Operation.RESPONSES, {}, True, True),
        (Operation.COMPLETION, {"echo": True, "logprobs": 0}, False, False),
        (Operation.COMPLETION, {"prompt_logprobs": 0}, False, False),
        (Operation.CHAT, {"echo": True}, False, False),
        (Operation.CHAT, {"use_beam_search": True}, False, False),
        (Operation.RESPONSES, {"include": ["message.output_text.logprobs"]}, False, False),
        (Operation.EMBEDDING, {}, False, False),
    ],
)
def test_a_request_can_be_stopped_if_nothing_of_its_answer_is_then_lost(
    operation: Operation, body: dict[str, Any], is_stream: bool, is_whole: bool
) -> None:
    assert is_preemptible(operation, body | {"stream": True}) is is_stream
    assert is_preemptible(operation, body) is is_whole
    assert is_preemptible(operation, body | {"stream": False}) is is_whole
