"""`benchmarks.abuse --stalls`: its requests have the sizes that they claim, and its verdict counts every failure."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from benchmarks.abuse.stall_bodies import ANSWERS, LARGE, TOP_LOGPROBS, TRIVIAL, arms, encoded
from benchmarks.abuse.stall_clients import CUT, LEFT, TIMEOUT, exchange, flood, probe
from benchmarks.abuse.stalls import BAR_S, figures, met
from serve_app.core.body_bounds import LARGE_OBJECTS, LARGE_TEXT_CHARS
from serve_app.errors import BadRequest
from serve_app.http.parameter_bounds import LIST_BOUNDS, check_parameters

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
BOUND_S = 20.0  # of an exchange on loopback that ends by itself


def body(arm: str) -> dict[str, Any]:
    asked = arms()[arm]
    assert asked is not None
    return dict(asked.body)


@pytest.mark.parametrize(
    ("arm", "field", "count"),
    [
        ("responses_40000_items", "input", 40_000),
        ("responses_4000_items", "input", 4_000),
        ("input_tokens_4000_items", "input", 4_000),
        ("chat_80000_messages", "messages", 80_000),
        ("chat_3000_messages", "messages", 3_000),
        ("chat_500_messages", "messages", 500),
        ("tools_400", "tools", 400),
        ("bad_words_800_kb", "bad_words", 10),
        ("tokenize_250_kb", "prompt", 250_000),
    ],
)
def test_a_request_has_as_many_entries_as_its_arm_says(arm: str, field: str, count: int) -> None:
    assert len(body(arm)[field]) == count


def test_a_chat_below_the_helpers_threshold_and_a_large_one_are_on_both_sides_of_it() -> None:
    assert len(body("chat_500_messages")["messages"]) < LARGE_OBJECTS
    assert len(LARGE.body["prompt"]) > LARGE_TEXT_CHARS


def test_bad_words_are_exactly_at_their_bound_and_far_above_it() -> None:
    at = body("bad_words_at_bound")
    bounds = LIST_BOUNDS["bad_words"]
    assert (len(at["bad_words"]), sum(map(len, at["bad_words"]))) == (bounds.entries, bounds.bytes)
    check_parameters(at)
    assert {len(word) for word in body("bad_words_800_kb")["bad_words"]} == {800_000}
    for arm in ("bad_words_800_kb", "repetition_1e9"):
        with pytest.raises(BadRequest):
            check_parameters(body(arm))


@pytest.mark.parametrize("arm", ["prompt_logprobs_at_bound", "echo_logprobs"])
def test_log_probabilities_of_a_prompt_are_at_their_bound(arm: str) -> None:
    most = 49_152
    each = TOP_LOGPROBS * ANSWERS
    assert most - each < len(body(arm)["prompt"]) * each <= most
    assert len(body(arm)["prompt"]) + 1 <= 2048, "it fits the model"


def test_a_large_body_is_compressed_and_a_small_one_is_not() -> None:
    asked = arms()["chat_80000_messages"]
    assert asked is not None
    data, headers = encoded(asked, "tiny")
    assert headers == {"content-encoding": "gzip"}
    assert json.loads(gzip.decompress(data)) == {"model": "tiny", **asked.body}
    data, headers = encoded(TRIVIAL, "tiny")
    assert headers == {}
    assert json.loads(data)["model"] == "tiny"


def test_figures_count_failed_requests_and_their_waits() -> None:
    found = figures([("200", 0.1), ("200", 0.3), ("429", 0.2), (TIMEOUT, 60.0), ("200", 0.1)], {"400": 7, "200": 1})
    assert found == {
        "wait_s_max": 60.0,
        "wait_s_p50": 0.2,
        "requests": 5,
        "failed": 2,
        "statuses": {"200": 1, "400": 7},
    }


def test_an_arm_keeps_the_bar_only_without_a_late_or_a_failed_request() -> None:
    waits = {"fast": [("200", BAR_S)], "late": [("200", BAR_S + 0.01)], "refused": [("429", 0.01)]}
    assert met({arm: figures(each, {}) for arm, each in waits.items()}) == {
        "fast": True,
        "late": False,
        "refused": False,
    }


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answering(answer: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        finally:
            writer.close()  # also when the loop ends with the connection open

    return serve


async def with_server(serve: Serve, ask: Callable[[tuple[str, int]], Awaitable[Any]]) -> Any:
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        return await ask(server.sockets[0].getsockname())


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (ANSWER, "200"),
        (b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", "400"),
        (ANSWER[:-1], CUT),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", CUT),
        (b"HTTP/1.1 200", CUT),
        (b"", CUT),
    ],
)
def test_an_answer_counts_by_its_status_only_when_it_is_whole(answer: bytes, status: str) -> None:
    found = asyncio.run(with_server(answering(answer), lambda address: exchange(address, b"GET /\r\n\r\n", BOUND_S)))
    assert found[0] == status


def test_the_other_tenant_sends_at_equal_distances_and_each_request_is_counted() -> None:
    found = asyncio.run(
        with_server(answering(ANSWER), lambda address: probe(address, b"GET /\r\n\r\n", 0.05, 0.01, BOUND_S))
    )
    assert [status for status, _ in found] == ["200"] * 5


@pytest.mark.parametrize(("answer", "statuses"), [(ANSWER, {"200"}), (None, {LEFT})])
def test_abusers_requests_are_counted_also_those_that_the_end_of_the_span_cuts_off(
    answer: bytes | None, statuses: set[str]
) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()  # until the client leaves
        finally:
            writer.close()

    async def ask(address: tuple[str, int]) -> dict[str, int]:
        return await asyncio.to_thread(flood, address, b"GET /\r\n\r\n", 3, 1.0, BOUND_S)

    found = asyncio.run(with_server(silent if answer is None else answering(answer), ask))
    assert found.keys() - {LEFT} == statuses - {LEFT}
    assert found.get(LEFT, 0) == 3 if answer is None else sum(found.values()) >= 3
