"""Request bodies: what is decoded, what is refused, and that hostile ones cost little."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.json_bounds import LONG_DIGITS, SLICE_BYTES, SLOW_NUMBER_VALUES, structural_count
from serve_app.errors import BadRequest, BodyTooLarge, BodyTooSlow
from serve_app.http import body as body_module
from serve_app.http.body import (
    check_content,
    check_count,
    decode,
    inflate,
    is_gzip,
    read,
)
from serve_app.settings import HttpSettings
from tests.effort import effort

BOUNDS = HttpSettings()
MOST = BOUNDS.max_json_values
SHALLOW = HttpSettings(max_json_depth=4)
HOSTILE_BYTES = effort(BOUNDS.max_body_bytes // 4, BOUNDS.max_body_bytes)
LINEAR_S = 5.0  # of CPU time: 8 MB take under 0.5 s, a quadratic scan of 2 MB minutes, so nothing blurs the two

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
texts = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from('[]{}"\\'), max_size=12)
values = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def asked_for(value: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body that ask for something."""
    return {name: one for name, one in value.items() if one is not None}


def refusal(body: bytes, bounds: HttpSettings = BOUNDS) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        decode(body, bounds)
    assert caught.value.param == "body"
    return caught.value


@given(st.dictionaries(texts, values, max_size=5), st.booleans())
def test_any_json_object_is_decoded_as_the_standard_library_does(value: dict[str, Any], ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert json.loads(body) == value
    assert decode(body, HttpSettings(max_json_depth=512)) == asked_for(value)


def test_a_field_that_is_null_is_one_that_was_not_sent() -> None:
    nothing = {"encoding_format": None, "output_expires_after": None, "unknown": None}
    meant = {"max_tokens": None, "messages": [{"content": None}], "tools": [{"enum": [None]}], "metadata": {"a": None}}
    assert decode(json.dumps(nothing | meant).encode(), BOUNDS) == meant


@given(st.dictionaries(texts, values, max_size=3), st.integers(4, 8))
def test_the_depth_bound_is_exact(value: dict[str, Any], bound: int) -> None:
    bounds = HttpSettings(max_json_depth=bound)
    body = json.dumps(value).encode()
    if depth(value) <= bound:
        assert decode(body, bounds) == asked_for(value)
    else:
        assert f"deeper than {bound} levels" in refusal(body, bounds).message


@given(st.binary(max_size=60) | st.text('{}[]":,\\u0d8123eE.-+ntf\x00é', max_size=40).map(str.encode))
def test_any_bytes_are_a_dict_or_a_bad_request(body: bytes) -> None:
    with contextlib.suppress(BadRequest):
        assert decode(body, SHALLOW) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "ends too early (byte 1)"),
        (b'{"a": oops}', "byte 6"),
        (b'{"a": 1,}', "byte 8"),
        (b'{"a": NaN}', "byte 6"),
        (b'{"a": -Infinity}', "byte 7"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": 1} x', "trailing"),
        (b'{"a": "b\xff"}', "UTF-8 at byte 8"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8 at byte 7"),
        (b'{"a": "\\udc00 alone"}', "surrogate"),
        (b'{"a": "\\ud800 alone"}', "half a surrogate pair (byte 7)"),
        (b'{"a": "\\\\ud800 \\ud83d\\ude00 \\ud800"}', "half a surrogate pair (byte 28)"),
        (b'{"a": "\\ud83d\\ude00', "ends too early (byte 19)"),
        (b"\xef\xbb\xbf{}", "byte 0"),
        (b'{"a": "\x00"}', "byte"),
    ],
)
def test_bad_json_is_named_with_its_place(body: bytes, reported: str) -> None:
    error = refusal(body)
    assert reported in error.message
    assert "request body" in error.message
    assert error.status == 400


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"[]", "an array"),
        (b'"x"', "a string"),
        (b"1", "a number"),
        (b"1.5", "a number"),
        (b"null", "null"),
        (b"true", "a"),
    ],
)
def test_only_an_object_is_a_request(body: bytes, found: str) -> None:
    assert f"it is {found}" in refusal(body).message


def test_of_a_key_given_twice_the_last_counts() -> None:
    assert decode(b'{"model": "a", "model": "b"}', BOUNDS) == {"model": "b"}


def test_a_body_at_the_byte_bound_passes_and_one_byte_more_does_not() -> None:
    bounds = HttpSettings(max_body_bytes=1024)
    body = b'{"a":"' + b"x" * (1024 - 8) + b'"}'

    async def received(*parts: bytes) -> bytes:
        left = list(parts)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        return await read({}, receive, bounds)

    assert asyncio.run(received(body[:9], body[9:])) == body
    for parts in ((body + b" ",), (body, b" ")):
        with pytest.raises(BodyTooLarge) as caught:
            asyncio.run(received(*parts))
        assert caught.value.status == 413


def test_brackets_in_text_are_not_containers() -> None:
    text = "a[i] = {'b': [\"\\\\\"]};" * (MOST // 3)
    body = json.dumps({"prompt": [text, '"[', "\\"]}).encode()
    assert body.count(b"[") + body.count(b"{") > MOST
    assert decode(body, BOUNDS) == {"prompt": [text, '"[', "\\"]}


@pytest.mark.parametrize(("unit", "least"), [(b"[]", 2), (b"1", 1), (b'",[{"', 1), (b'"\\\\"', 1)])
def test_the_bound_of_values_is_exact(unit: bytes, least: int) -> None:
    few = MOST // least - 3
    body = b'{"a":[' + b",".join([unit] * few) + b"]}"
    assert len(decode(body, BOUNDS)["a"]) == few
    more = body.replace(b"]}", b"".join([b"," + unit] * 8) + b"]}")
    assert f"more than {MOST} values" in refusal(more).message


@given(st.dictionaries(texts, values, max_size=5), st.integers(1, 9))
def test_values_are_counted_alike_wherever_the_text_is_cut(value: dict[str, Any], slice_bytes: int) -> None:
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve_app.core.json_bounds.SLICE_BYTES", slice_bytes)
        counted = _counted(value)
        check_count(body, counted)
        with pytest.raises(BadRequest):
            check_count(body, counted - 1)


def _counted(value: Any) -> int:
    """Of each container itself and the commas in it, and of numbers with an exponent."""
    if isinstance(value, float) and "e" in json.dumps(value):
        return SLOW_NUMBER_VALUES
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return max(1, len(value)) + sum(map(_counted, inner))


SLOW_NUMBERS = (b"1e300", b"4.9E-324", b"1." + b"9" * 17 + b"e-300", b"7" * 300 + b".5", b"0." + b"3" * 800)


@pytest.mark.parametrize("number", SLOW_NUMBERS)
def test_numbers_that_take_a_parser_long_are_bounded_by_what_they_cost(number: bytes) -> None:
    """200,000 times `1e300`, 1.2 MB, hold the interpreter for more than a second."""
    body = b'{"logit_bias":[%s]}' % b",".join([number] * (MOST // SLOW_NUMBER_VALUES))
    assert f"more than {MOST} values" in refusal(body).message
    few = b'{"logit_bias":[%s]}' % b",".join([number] * (MOST // SLOW_NUMBER_VALUES // 32))
    assert len(decode(few, BOUNDS)["logit_bias"]) == MOST // SLOW_NUMBER_VALUES // 32


def test_text_that_looks_like_such_numbers_is_text() -> None:
    text = "1e300, " * (MOST // 8) + "7" * LONG_DIGITS * (MOST // SLOW_NUMBER_VALUES)
    assert decode(json.dumps({"prompt": text, "stream": True}).encode(), BOUNDS)["prompt"] == text


ATTACKS = {
    "numbers with exponents": b'{"prompt":[%s1]}' % (b"1e300," * (7 * 2**20 // 6)),
    "tools enum": b'{"tools":[{"function":{"parameters":{"enum":[%s1]}}}]}' % (b"1," * (7 * 2**19)),
    "strings": b'{"tools":[{"function":{"parameters":{"enum":[%s1]}}}]}' % (b'"",' * (7 * 2**20 // 3)),
    "integers": b'{"prompt":[%s1]}' % (b"1," * (7 * 2**19)),
    "logit_bias": b'{"logit_bias":{%s"":1}}' % b"".join(b'"%d":1,' % number for number in range(700_000)),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_seven_megabytes_of_values_are_refused_by_their_first_part_and_not_decoded(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "_decoder", None)  # it is never reached
    looked = 0

    def counted(marks: Any) -> Any:
        def look(text: bytes) -> int:
            nonlocal looked
            looked += len(text) <= SLICE_BYTES
            return int(marks(text))

        return look

    monkeypatch.setattr("serve_app.core.json_bounds.structural_count", counted(structural_count))
    assert "values" in refusal(ATTACKS[attack]).message
    assert looked * SLICE_BYTES < 0.5 * len(ATTACKS[attack])


@pytest.mark.parametrize(
    "unit",
    [
        b"[",
        b'{"a":',
        b'["[",',
        b'"\\"',
        b'["\\\\",',
        b"[],",
        b'{"a":{},"b":[]},',
        b"[{",
        b'"',
        b"\\",
        b'\\"',
        b"9" * 4300 + b",",
    ],
)
@pytest.mark.parametrize("head", [b"", b'{"a":[', b'{"a":"', b'{"a":"' + b"[" * 2 * MOST])
def test_hostile_megabytes_are_refused_in_linear_time(head: bytes, unit: bytes) -> None:
    body = head + unit * ((HOSTILE_BYTES - len(head)) // len(unit))
    started = time.process_time()
    refusal(body)
    assert time.process_time() - started < LINEAR_S


def test_nesting_below_the_container_bound_is_refused_without_recursion_errors() -> None:
    nested = b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    assert "deeper" in refusal(nested, HttpSettings(max_json_depth=512)).message


@pytest.mark.parametrize(
    "kind",
    [
        None,
        b"application/json",
        b"application/json; charset=utf-8",
        b"Application/JSON;charset=utf-8",
        b" application/json ",
    ],
)
def test_json_content_types_pass(kind: bytes | None) -> None:
    headers = {b"content-length": b"10", b"content-encoding": b"identity"}
    check_content(headers | ({b"content-type": kind} if kind else {}), 10)


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        (b"content-type", b"text/plain", 415),
        (b"content-type", b"application/x-www-form-urlencoded", 415),
        (b"content-type", b"multipart/form-data; boundary=\xff" + b"x" * 9999, 415),
        (b"content-type", b"", 415),
        (b"content-encoding", b"br", 415),
        (b"content-length", b"-1", 400),
        (b"content-length", b"1" * 5000, 400),
        (b"content-length", b"11", 413),
    ],
)
def test_a_body_is_refused_by_its_headers_before_it_is_read(name: bytes, value: bytes, status: int) -> None:
    with pytest.raises(BadRequest) as caught:
        check_content({name: value}, 10)
    assert caught.value.status == status
    assert len(caught.value.message) < 600
    assert caught.value.param


@pytest.mark.parametrize("chunk", [b"", b"x"])
def test_a_body_that_stalls_or_drips_is_refused_in_time(monkeypatch: pytest.MonkeyPatch, chunk: bytes) -> None:
    """Waits for ARRIVAL_S, made short: it is asyncio's own timeout that is asked for. A byte at a time is slow here
    however fast the machine takes them."""
    monkeypatch.setattr(body_module, "ARRIVAL_S", 0.05)
    monkeypatch.setattr(body_module, "ARRIVAL_BYTES_PER_S", 1_000_000_000)
    received = 0

    async def receive() -> dict[str, Any]:
        nonlocal received
        if received and not chunk:
            await asyncio.Event().wait()
        received += 1
        await asyncio.sleep(0)
        return {"type": "http.request", "body": chunk, "more_body": True}

    with pytest.raises(BodyTooSlow) as refused:
        asyncio.run(read({}, receive, BOUNDS))
    assert (refused.value.status, refused.value.code) == (408, "request_timeout")


def test_a_body_that_comes_at_the_rate_asked_for_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts, each of which arrives later than ARRIVAL_S after the one before, and is worth ten seconds."""
    monkeypatch.setattr(body_module, "ARRIVAL_S", 0.05)
    monkeypatch.setattr(body_module, "ARRIVAL_BYTES_PER_S", 10)
    parts = [b'{"prompt": "' + b"x" * 100, b"x" * 100, b'"}']
    left = list(parts)

    async def receive() -> dict[str, Any]:
        if len(left) < len(parts):
            await asyncio.sleep(0.06)  # a slow client
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    assert asyncio.run(read({}, receive, BOUNDS)) == b'{"prompt": "' + b"x" * 200 + b'"}'


@pytest.mark.parametrize("encoding", [b"gzip", b"GZIP ", b"x-gzip"])
def test_a_body_in_gzip_is_inflated(encoding: bytes) -> None:
    headers = {b"content-encoding": encoding}
    check_content(headers, 10)
    assert is_gzip(headers)
    assert inflate(gzip.compress(b"0123456789", mtime=0), 10) == b"0123456789"


def test_a_gzip_bomb_is_refused_after_the_bound() -> None:
    bomb = gzip.compress(bytes(64 * 2**20))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            inflate(bomb, 2**16)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        gzip.compress(b"{}", mtime=0)[:-1],
        gzip.compress(b"{}", mtime=0) + b"x",
        gzip.compress(b"{", mtime=0) + gzip.compress(b"}", mtime=0),
    ],
)
def test_what_is_not_one_whole_gzip_member_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        inflate(body, 100)
    assert caught.value.param == "body"
