"""What is recorded of a stream over any number of runs is what one undisturbed run would have recorded."""

from __future__ import annotations

import itertools
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core import continuation
from serve_app.core.continuation import GROUP_WORDS, Produced, is_continuable
from serve_app.types import Operation

groups = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6)  # a choice, and its tokens
messages = st.lists(st.tuples(st.lists(groups, max_size=3), st.integers(0, 4)), max_size=30)


@given(messages, st.lists(st.integers(0, 30), max_size=4))
def test_cut_anywhere_and_as_often_as_you_like_the_record_is_that_of_one_run(
    sent: list[tuple[list[list[int]], int]], cuts: list[int]
) -> None:
    record, borders = Produced(), [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    for start, end in itertools.pairwise(borders):
        # what the next engine is told is exactly what the client has, and it goes on from there
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


def test_a_response_whose_last_event_repeats_all_logprobs_is_not_continued() -> None:
    wanted = {"include": ["message.output_text.logprobs"]}
    assert not is_continuable(Operation.RESPONSES, wanted)
    assert is_continuable(Operation.RESPONSES, {"include": ["reasoning.encrypted_content"]})
    assert is_continuable(Operation.RESPONSES, {"include": "message"})
    assert is_continuable(Operation.CHAT, {"logprobs": True, "top_logprobs": 2})
    assert is_continuable(Operation.COMPLETION, wanted)
