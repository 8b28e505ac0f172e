"""What an entry of a stream asks for, and what becomes of it."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.batches import BadRow
from serve_app.core.batches.intake import (
    DEFAULT_RETRY_AFTER_S,
    MAX_RETRY_AFTER_S,
    EntryVerdict,
    StreamEntry,
    entries_to_read,
    idempotency_key,
    request_of,
    verdict,
    wait_s,
)

BODY = b'{"model": "tiny", "messages": []}'


def entry(**fields: bytes) -> StreamEntry:
    return StreamEntry("rows", "7-0", {name.encode(): value for name, value in ({"body": BODY} | fields).items()})


def test_an_entry_is_a_chat_request_under_its_own_name_unless_it_says_more() -> None:
    request = request_of(entry())
    assert (request.path, request.model, request.body) == ("/v1/chat/completions", "tiny", BODY)
    assert entry().request_id == "rows-7-0"
    assert entry(id=b"order-1").request_id == "order-1"
    assert request_of(entry(endpoint=b"/v1/embeddings")).path == "/v1/embeddings"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"id": b""}, "id"),
        ({"id": b"two words"}, "id"),
        ({"id": b"\xff"}, "id"),
        ({"id": b"x" * 241}, "id"),
        ({"endpoint": b"/v1/files"}, "endpoint"),
        ({"endpoint": b"\xff"}, "endpoint"),
        ({"body": b'{"messages": []}'}, "body.model"),
        ({"body": b'{"model": 3}'}, "body.model"),
        ({"body": b'{"model": "tiny", "stream": true}'}, "body.stream"),
        ({"body": b"[" * 100_000}, None),
        ({"body": b"\xff"}, None),
    ],
)
def test_an_entry_that_no_delivery_could_run_says_which_field_is_wrong(
    fields: dict[str, bytes], param: str | None
) -> None:
    with pytest.raises(BadRow) as bad:
        request_of(entry(**fields))
    assert bad.value.error.param == param
    assert entry(**fields).request_id, "its reply has an id all the same"


@given(st.dictionaries(st.sampled_from([b"id", b"endpoint", b"body", b"reply_to", b"reason"]), st.binary(max_size=40)))
def test_whatever_an_entry_holds_its_dead_letter_holds_it_too(fields: dict[bytes, bytes]) -> None:
    source = StreamEntry("rows", "7-0", fields)
    with contextlib.suppress(BadRow):
        request_of(source)
    letter = source.dead_letter("why")
    assert letter[b"entry"] == b"7-0"
    assert sorted(letter.values()) == sorted([*fields.values(), b"why", b"1", b"rows", b"7-0"])
    assert source.reply_stream("replies", "replies:") in (
        "replies",
        fields.get(b"reply_to", b"").decode(errors="replace"),
    )


def test_a_reply_goes_only_where_the_settings_allow() -> None:
    allowed = entry(reply_to=b"replies:me")
    assert allowed.reply_stream("replies", None) == "replies"
    assert allowed.reply_stream("replies", "replies:") == "replies:me"
    assert allowed.reply_stream("replies", "replies:", {"replies:me"}) == "replies"
    assert entry(reply_to=b"rows").reply_stream("replies", "replies:") == "replies"


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (200, None, EntryVerdict.ANSWERED),
        (429, "queue_full", EntryVerdict.LATER),
        (503, "no_replica", EntryVerdict.LATER),
        (401, "invalid_api_key", EntryVerdict.LATER),
        (408, None, EntryVerdict.FAILED),
        (409, "idempotency_run_lost", EntryVerdict.FAILED),
        (409, "lease_conflict", EntryVerdict.REFUSED),
        (500, None, EntryVerdict.FAILED),
        (500, "request_failed", EntryVerdict.REFUSED),
        (502, "engine_failed", EntryVerdict.FAILED),
        (400, None, EntryVerdict.REFUSED),
        (404, None, EntryVerdict.REFUSED),
    ],
)
def test_an_answer_decides_what_becomes_of_its_entry(status: int, code: str | None, expected: EntryVerdict) -> None:
    assert verdict(status, code) is expected


def test_a_wait_is_what_the_answer_says_within_bounds() -> None:
    assert wait_s(429, None) == DEFAULT_RETRY_AFTER_S
    assert wait_s(429, 7.5) == 7.5
    assert wait_s(429, 86_400) == MAX_RETRY_AFTER_S
    assert wait_s(503, 0.0) > 0
    assert wait_s(401, None) > DEFAULT_RETRY_AFTER_S


def test_every_consumer_comes_to_the_same_keys() -> None:
    assert [idempotency_key("order-1", used_up) for used_up in range(3)] == ["order-1", "order-1~1", "order-1~2"]
    assert len(idempotency_key("x" * 240, 999)) <= 255


@given(st.lists(st.integers(0, 600), max_size=4), st.integers(0, 600), st.integers(-10, 600))
def test_no_more_entries_are_read_than_could_start_but_for_one_that_waits(
    may_start: list[int], held_back: int, room: int
) -> None:
    count = entries_to_read(may_start, held_back, room)
    assert count <= room
    assert held_back + max(count, 0) <= max(held_back, max(may_start, default=0), 1)
    if room > 0:
        assert count >= (0 if held_back else 1)


def test_the_body_of_an_entry_is_sent_as_it_is() -> None:
    text = b'{ "model":"tiny", "x": 1.0e2 }'
    assert request_of(entry(body=text)).body == text
    assert json.loads(text)["x"] == 100
