"""Lines of a batch's input file: what is a row, what is refused and how it is said, and how a file is split."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.batches import ENDPOINTS, BadRow, Line, LineSplitter, RowCheck, RowError, read_row
from serve_app.core.batches.rows import MAX_DEPTH, MAX_LINE_BYTES, MAX_NAME_CHARS, MAX_VALUES, PREFIX_BYTES

CHAT = "/v1/chat/completions"


def fields(**changes: Any) -> dict[str, Any]:
    row = {"custom_id": "r1", "method": "POST", "url": CHAT, "body": {"model": "m", "messages": []}, **changes}
    return {name: value for name, value in row.items() if value is not ...}


def line(**changes: Any) -> bytes:
    return json.dumps(fields(**changes)).encode()


def refusal(text: bytes) -> RowError:
    with pytest.raises(BadRow) as raised:
        read_row(text, 7)
    return raised.value.error


def prefix(**body: Any) -> int:
    return read_row(line(body={"model": "m", **body}), 1).prefix


@pytest.mark.parametrize("url", ENDPOINTS)
def test_a_row_of_each_endpoint_is_read(url: str) -> None:
    row = read_row(line(url=url, body={"model": "m", "input": "x"}, extra=1), 3)
    assert (row.custom_id, row.method, row.url, row.model) == ("r1", "POST", url, "m")
    assert row.body == {"model": "m", "input": "x"}


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": ...}, "missing_required_parameter", "custom_id"),
        ({"custom_id": 3}, "invalid_type", "custom_id"),
        ({"custom_id": ""}, "invalid_value", "custom_id"),
        ({"custom_id": "x" * (MAX_NAME_CHARS + 1)}, "invalid_value", "custom_id"),
        ({"custom_id": "a\0"}, "invalid_value", "custom_id"),
        ({"custom_id": "\ud800"}, "invalid_value", "custom_id"),
        ({"method": ...}, "missing_required_parameter", "method"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"method": ["POST"]}, "invalid_method", "method"),
        ({"url": ...}, "missing_required_parameter", "url"),
        ({"url": "/v1/score"}, "invalid_url", "url"),
        ({"url": {}}, "invalid_url", "url"),
        ({"body": ...}, "missing_required_parameter", "body"),
        ({"body": "{}"}, "invalid_type", "body"),
        ({"body": {}}, "missing_required_parameter", "body.model"),
        ({"body": {"model": None}}, "invalid_type", "body.model"),
        ({"body": {"model": ""}}, "invalid_value", "body.model"),
        ({"body": {"model": "m", "stream": True}}, "invalid_value", "body.stream"),
        ({"body": {"model": "m", "stream": "yes"}}, "invalid_value", "body.stream"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(changes: dict[str, Any], code: str, param: str) -> None:
    error = refusal(line(**changes))
    assert (error.line, error.code, error.param) == (7, code, param)
    assert param.rpartition(".")[2] in error.message or "streamed" in error.message
    error.message.encode("ascii")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "valid JSON"),
        (b"", "valid JSON"),
        (b'{"a": 1} {}', "valid JSON: Extra data"),
        (b"[]", "it is an array"),
        (b"3", "it is a number"),
        (b'"\xff"', "UTF-8 at byte 1"),
        (b"\xef\xbb\xbf{}", "valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
    ],
)
def test_what_is_no_json_object_is_refused(text: bytes, words: str) -> None:
    error = refusal(text)
    assert (error.line, error.code, error.param) == (7, "invalid_json_line", None)
    assert words in error.message


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"body": {"model": "m", "messages": [{"content": f"hi {HALF}"}]}}, "body.messages.0.content"),
        ({"body": {"model": "m", "prompt": ["a", "\ude00\ud83d"]}}, "body.prompt.1"),
        ({"extra": {"é": HALF}}, r"extra.\xe9"),
        ({"body": {"model": "m", HALF: 1}}, None),
    ],
)
def test_half_a_surrogate_pair_is_refused_by_its_place(changes: dict[str, Any], param: str | None) -> None:
    error = refusal(line(**changes))
    assert (error.line, error.code, error.param) == (7, "invalid_value", param)
    assert "half a surrogate pair" in error.message
    error.message.encode("ascii")


@pytest.mark.parametrize("text", ["\U0001f600", "\\ud83d", "\\\U0001f600", "\uffff\ud7ff\ue000", '\n\t"/'])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_whole_pairs_and_what_only_looks_like_half_of_one_are_text(text: str, ascii_only: bool) -> None:
    row = fields(body={"model": "m", "prompt": text})
    assert read_row(json.dumps(row, ensure_ascii=ascii_only).encode(), 1).body["prompt"] == text


@pytest.mark.parametrize("unit", [b"\\\\", b"\\ud83d\\ude00", b"\\u00e9", b"a", b"\\n"])
def test_the_search_for_half_a_pair_takes_time_in_proportion_to_the_bytes(unit: bytes) -> None:
    text = line(body={"model": "m", "prompt": "HERE"}).replace(b"HERE", unit * (2**21 // len(unit)) + b"\\ud83d")
    began = time.process_time()
    assert refusal(text).param == "body.prompt"
    assert time.process_time() - began < 1.0  # a hundredth of it on an idle machine; in proportion to the square, hours


def test_stream_false_is_no_stream() -> None:
    assert read_row(line(body={"model": "m", "stream": False}), 1).body["stream"] is False


def nested(depth: int) -> bytes:
    """A row of so many levels."""
    text = line(body={"model": "m", "x": "HERE"}).replace(b'"HERE"', b"%s")
    return text % (b"[" * (depth - 2) + b"]" * (depth - 2))


def test_a_row_is_as_deep_as_a_request_may_be_and_no_deeper() -> None:
    assert read_row(nested(MAX_DEPTH), 1).model == "m"
    for depth in (MAX_DEPTH + 1, 100_000):
        assert "nested deeper" in refusal(nested(depth)).message


def test_bombs_of_values_and_long_lines_are_refused_unparsed() -> None:
    tracemalloc.start()
    try:
        assert f"more than {MAX_VALUES} values" in refusal(b"[" + b"0," * MAX_VALUES + b"0]").message
        assert tracemalloc.get_traced_memory()[1] < 16 * MAX_VALUES, "the values were made"
    finally:
        tracemalloc.stop()
    assert refusal(b" " * (MAX_LINE_BYTES + 1)).code == "line_too_long"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": json_values | st.text(min_size=1),
        "method": st.just("POST") | json_values,
        "url": st.sampled_from(ENDPOINTS) | json_values,
        "body": json_values
        | st.fixed_dictionaries({"model": st.text()}, optional={"messages": json_values, "prompt": json_values}),
    },
)


@given(st.binary(max_size=60) | rows.map(lambda row: json.dumps(row).encode()))
def test_whatever_a_line_is_it_is_a_row_or_refused(text: bytes) -> None:
    try:
        row = read_row(text, 9)
        error = None
    except BadRow as bad:
        row = None
        error = bad.error
    if row is None:
        assert error is not None
        assert (error.line, bool(error.message)) == (9, True)
    else:
        given_row = json.loads(text)
        assert row.url in ENDPOINTS
        assert (row.custom_id, row.model) == (given_row["custom_id"], given_row["body"]["model"])
        assert 0 <= row.prefix < 2**63


def test_a_custom_id_is_unique_in_a_file() -> None:
    check = RowCheck()
    for number in range(1, 100):
        check.feed(line(custom_id=f"r{number}"), number)
    with pytest.raises(BadRow) as raised:
        check.feed(line(custom_id="r42"), 100)
    assert raised.value.error.code == "duplicate_custom_id"
    assert (raised.value.error.line, raised.value.error.param) == (100, "custom_id")
    assert "'r42'" in raised.value.error.message
    RowCheck().feed(line(custom_id="r42"), 1)  # of another file


def test_a_refused_line_leaves_its_id_free() -> None:
    check = RowCheck()
    with pytest.raises(BadRow):
        check.feed(line(method="GET"), 1)
    assert check.feed(line(), 2).custom_id == "r1"


SYSTEM = "You are a helpful assistant. " * 100


def chat(system: str, question: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]}


def test_prompts_with_the_same_beginning_have_the_same_prefix() -> None:
    assert prefix(**chat(SYSTEM, "one")) == prefix(**chat(SYSTEM, "two"))
    assert prefix(prompt=SYSTEM + "one") == prefix(prompt=SYSTEM + "two")
    assert prefix(input=SYSTEM, instructions="a") != prefix(input=SYSTEM, instructions="b")
    assert prefix(prompt=list(range(2000))) == prefix(prompt=list(range(3000)))
    assert prefix(**chat("Short.", "one")) != prefix(**chat("Short.", "two"))


def test_the_form_of_a_content_does_not_change_the_prefix() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert prefix(messages=parts) == prefix(messages=[{"content": "Hello", "role": "user"}])


@given(
    st.lists(st.sampled_from([20, 100, 500]).flatmap(lambda size: st.text("ab", min_size=size, max_size=size))),
    st.integers(1, 4),
)
def test_prompts_that_share_less_than_a_kib_are_neighbours(beginnings: list[str], copies: int) -> None:
    prompts = sorted((begin + f"{number} end" for number in range(copies) for begin in beginnings), key=hash)
    ordered = sorted(prompts, key=lambda prompt: prefix(prompt=prompt))
    for size in PREFIX_BYTES:
        groups = [prompt[:size] for prompt in ordered]
        changes = sum(one != other for one, other in pairwise(groups))
        assert changes == max(len(set(groups)) - 1, 0)


def test_a_prefix_is_the_same_in_every_process() -> None:
    code = "import sys; from serve_app.core.batches import read_row; print(read_row(sys.stdin.buffer.read(), 1).prefix)"
    text = line(body={"model": "m", **chat(SYSTEM, "one")})
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            input=text,
            capture_output=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    ]
    assert {int(out) for out in runs} == {read_row(text, 1).prefix}


def naive_lines(text: bytes) -> list[Line]:
    """The lines by offsets of the whole text."""
    found = []
    offset = 0
    for number, raw in enumerate(text.split(b"\n"), start=1):
        if raw.strip():
            found.append(Line(number, offset, raw.removesuffix(b"\r")))
        offset += len(raw) + 1
    return found


def chunked(text: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def split(splitter: LineSplitter, chunks: list[bytes]) -> list[Line]:
    return [found for chunk in chunks for found in splitter.feed(chunk)] + list(splitter.end())


@given(st.lists(st.sampled_from([b"a", b"\xff\xfe", b"\r", b"\n", b"\r\n", b" ", b"\t"])), st.lists(st.integers(0)))
def test_lines_are_those_of_a_naive_split_however_the_file_is_cut(tokens: list[bytes], cuts: list[int]) -> None:
    text = b"".join(tokens)
    lines = split(LineSplitter(), chunked(text, cuts))
    assert lines == naive_lines(text)
    for line in lines:
        assert text[line.offset : line.offset + len(line.data)] == line.data


def test_blank_lines_in_a_row_are_passed_in_one_step() -> None:
    """They count as no rows, so nothing else bounds how many a file has."""
    calls: list[str] = []
    sys.setprofile(lambda _frame, event, _argument: calls.append(event))
    try:
        lines = split(LineSplitter(), [b"\n" * 1000 + b" \r\n" * 1000 + b"{}"])
    finally:
        sys.setprofile(None)
    assert [(one.number, one.offset) for one in lines] == [(2001, 4000)]
    assert len(calls) < 100


def test_a_line_that_is_too_long_is_refused_before_its_end() -> None:
    splitter = LineSplitter(max_line_bytes=10)
    assert [one.data for one in splitter.feed(b"x" * 10 + b"\n" + b"y" * 6)] == [b"x" * 10]
    with pytest.raises(BadRow) as raised:
        list(splitter.feed(b"y" * 5))
    assert (raised.value.error.code, raised.value.error.line) == ("line_too_long", 2)


def test_of_a_file_one_line_is_in_memory() -> None:
    row = line(body={"model": "m", "prompt": "x" * 10_000}) + b"\n"
    splitter = LineSplitter()
    count = 0
    tracemalloc.start()
    try:
        for _ in range(2000):  # 20 MB
            count += sum(1 for _ in splitter.feed(row))
        assert tracemalloc.get_traced_memory()[1] < 10 * len(row)
    finally:
        tracemalloc.stop()
    assert count == 2000
