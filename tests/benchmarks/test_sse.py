"""Events are judged whole and by their keys, however the bytes were cut and whatever the text says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.sse import EventKind, SseSplitter, Usage, classify, parse_usage


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def delta(**content: str) -> bytes:
    return event(id="chatcmpl-1", choices=[{"index": 0, "delta": content, "finish_reason": None}])


@given(st.lists(st.binary(min_size=1).filter(lambda b: b"\n" not in b), max_size=8), st.data())
def test_any_cut_of_the_stream_gives_the_same_events(events: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(e + b"\n\n" for e in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    splitter = SseSplitter()
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += splitter.feed(stream[begin:end])
    assert found == events
    assert splitter.pending == b""


def test_an_unfinished_event_is_pending() -> None:
    splitter = SseSplitter()
    assert splitter.feed(b"data: {") == []
    assert splitter.pending == b"data: {"


@given(st.text())
def test_text_cannot_imitate_a_key(text: str) -> None:
    assert classify(delta(content=text)) is EventKind.TOKENS


@pytest.mark.parametrize("text", ['"role":', '"usage":{', '"error":', "data: [DONE]", '"choices":[{'])
def test_text_that_quotes_the_stream_format_is_still_text(text: str) -> None:
    assert classify(delta(content=text)) is EventKind.TOKENS


def test_the_role_does_not_move_the_clock_and_an_empty_delta_does() -> None:
    assert classify(delta(role="assistant", content="")) is EventKind.ROLE
    assert classify(delta(content="")) is EventKind.TOKENS


def test_usage_done_errors_and_comments_are_distinguished() -> None:
    usage = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 128})
    assert classify(usage) is EventKind.USAGE
    assert parse_usage(usage) == Usage(9, 128)
    assert classify(b"data: [DONE]") is EventKind.DONE
    assert classify(event(error={"message": "engine died"})) is EventKind.ERROR
    assert classify(b": ping") is EventKind.OTHER


def test_a_usage_event_without_counts_is_an_error() -> None:
    with pytest.raises(ValueError, match="completion_tokens"):
        parse_usage(event(usage={"prompt_tokens": 9}))
