"""The pure part of stored responses: what a body asks for, a turn's whole input, what of a stream is a record."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.responses import (
    Asked,
    MissingItem,
    SentStream,
    asked_of,
    evicted,
    expanded,
    forwarded,
    input_items,
    own_items,
    own_path,
    record_of,
    with_fields,
)
from serve_app.errors import BadRequest, NotFound

PREVIOUS = f"resp_{'0' * 32}"
FIELDS = {"store": True, "previous_response_id": None}
ITEM = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
CALL = {"id": "fc_1", "type": "function_call", "call_id": "c", "name": "f", "arguments": ""}


def new_ids() -> Any:
    numbers = itertools.count()
    return lambda prefix: f"{prefix}_new{next(numbers)}"


def event(kind: str, **fields: Any) -> bytes:
    return f"event: response.{kind}\ndata: {json.dumps({'type': f'response.{kind}', **fields})}\n\n".encode()


def delta(text: str) -> bytes:
    return event("output_text.delta", item_id="msg_1", delta=text)


BEGUN = [event("created", response={"id": "r", "output": []}), event("in_progress", response={"id": "r", "output": []})]
DONE = event("output_item.done", item={**ITEM, "content": [{"type": "output_text", "text": "ab"}]})
WHOLE = [
    *BEGUN,
    event("output_item.added", item=ITEM),
    delta("a"),
    delta("b"),
    DONE,
    event("completed", response={"id": "r", "output": [ITEM]}),
]


@pytest.mark.parametrize("by_default", [False, True])
def test_a_body_asks_for_what_it_says(by_default: bool) -> None:
    assert asked_of({}, by_default=by_default) == Asked(store=by_default)
    assert asked_of({"store": not by_default}, by_default=by_default).store is not by_default
    found = asked_of(
        {"previous_response_id": PREVIOUS, "input": [{"type": "item_reference", "id": "msg_1"}, 5]}, by_default=False
    )
    assert found == Asked(False, PREVIOUS, ("msg_1",))
    assert found.needs_store
    assert not asked_of({"store": False}, by_default=by_default).needs_store


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"store": 1}, BadRequest),
        ({"previous_response_id": ["a"]}, BadRequest),
        ({"previous_response_id": "chatcmpl-1"}, NotFound),
        ({"previous_response_id": PREVIOUS + "\n"}, NotFound),
    ],
)
def test_what_is_no_id_of_a_response_is_refused(body: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        asked_of(body, by_default=False)


def test_the_turns_before_come_first_and_the_store_s_fields_go() -> None:
    before = [{"type": "message", "role": "user", "id": "msg_0", "status": "completed", "content": "a"}, ITEM]
    body = {"model": "m", "input": "b", "store": True, "previous_response_id": PREVIOUS}
    found = expanded(forwarded(body), before, own_items("b", {}))
    assert found == {
        "model": "m",
        "input": [
            {"type": "message", "role": "user", "content": "a"},
            ITEM,
            {"type": "message", "role": "user", "content": "b"},
        ],
    }
    assert body["store"] is True


def test_a_reference_is_the_item_or_missing() -> None:
    given = ["a", {"type": "item_reference", "id": "msg_1"}]
    assert own_items(given, {"msg_1": ITEM}) == ["a", ITEM]
    with pytest.raises(MissingItem) as caught:
        own_items(given, {"msg_2": ITEM})
    assert (caught.value.path, caught.value.item_id) == ("input.1", "msg_1")


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("input.5.content", "input.2.content"),
        ("`input.3` must be", "`input.0` must be"),
        ("input.2.content.0", "previous_response_id"),
        ("max_output_tokens", "max_output_tokens"),
    ],
)
def test_a_path_in_the_conversation_is_one_in_what_was_sent(text: str, own: str) -> None:
    assert own_path(text, 3) == own
    assert own_path(text, 0) == text


def test_items_of_an_input_are_listed_in_one_form_with_ids() -> None:
    own = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "id": "msg_7"},
        {"type": "function_call_output", "call_id": "c", "output": "1", "id": "x" * 65},
        5,
    ]
    assert input_items(own, new_ids()) == [
        {
            "status": "completed",
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}],
            "id": "msg_new0",
        },
        {
            "status": "completed",
            "type": "message",
            "role": "assistant",
            "id": "msg_7",
            "content": [{"type": "output_text", "annotations": [], "text": "b"}],
        },
        {"type": "function_call_output", "call_id": "c", "output": "1", "id": "fco_new1"},
    ]


@given(st.lists(st.integers(1, 12), max_size=200))
def test_a_stream_is_the_same_however_it_is_cut(lengths: list[int]) -> None:
    sent = b"".join(WHOLE)
    stream = SentStream(FIELDS)
    passed = b""
    at = 0
    for length in [*lengths, len(sent)]:
        passed += stream.feed(sent[at : at + length])
        at += length
    assert passed.count(b"output_text.delta") == 2 * 2
    assert stream.held.startswith(b"event: response.completed\n")
    assert stream.final == {"id": "r", "output": [ITEM], **FIELDS}
    assert passed.endswith(DONE)
    assert json.loads(passed.split(b"\n\n")[0].partition(b"data: ")[2])["response"] == {
        "id": "r",
        "output": [],
        **FIELDS,
    }


def test_a_stream_that_is_left_has_what_was_sent() -> None:
    stream = SentStream(FIELDS)
    assert stream.left("cancelled") is None
    stream.feed(b": a comment\n\n" + b"".join(WHOLE[:4]))
    left = stream.left("cancelled")
    assert left is not None
    assert (left["status"], left["store"]) == ("cancelled", True)
    (item,) = left["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "a")


def test_a_call_of_a_tool_that_is_cut_is_left_out() -> None:
    stream = SentStream(FIELDS)
    stream.feed(b"".join([*WHOLE[:-1], event("output_item.added", item=CALL)]))
    left = stream.left("failed", {"code": "server_error", "message": "lost"})
    assert left is not None
    assert [item["id"] for item in left["output"]] == ["msg_1"]
    assert left["error"]["message"] == "lost"


def test_a_record_shows_the_response_that_was_sent() -> None:
    body, response = with_fields(json.dumps({"id": "r", "output": [ITEM, {"type": "reasoning"}]}).encode(), FIELDS)
    assert json.loads(body) == response
    inputs = input_items([{"role": "user", "content": "é"}], new_ids())
    record = record_of(response, inputs, tenant="acme", now=5.0, keep_s=2.0, new_id=new_ids())
    assert (record.tenant, record.created_at, record.expires_at) == ("acme", 5.0, 7.0)
    assert record.shown() == {**response, "output": [ITEM, {"type": "reasoning", "id": "rs_new0"}]}
    assert [item.is_output for item in record.items] == [False, True, True]
    assert record.size > sum(len(item.text) for item in record.items)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(0, 300))
def test_the_first_go_and_no_more_than_must(sizes: list[int], bound: int) -> None:
    entries = [(str(number), size) for number, size in enumerate(sizes)]
    gone = evicted(entries, sum(sizes) - bound)
    assert gone == [name for name, _ in entries[: len(gone)]]
    assert sum(sizes[len(gone) :]) <= bound
    if gone:
        assert sum(sizes[len(gone) - 1 :]) > bound
