"""Any endpoint: how it is asked, how its answers are read, and that no bound is passed."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.sse import AnswerReader, Usage
from benchmarks.endpoint.size import Size, add_size_arguments, size_of
from benchmarks.endpoint.target import Target, add_target_arguments, is_asked_for, target_of
from benchmarks.endpoint.traffic import Seen, Traffic
from benchmarks.overload.offered_load import Offer
from benchmarks.overload.open_loop import RETRY_S
from benchmarks.overload.open_loop_client import Ended
from tests.benchmarks.fake_endpoint import Asked, FakeEndpoint, serving
from tests.waiting import wait_until

KEYS = {"light": "key-of-light", "heavy": "key-of-heavy"}
TENANT_OF = {key: tenant for tenant, key in KEYS.items()}
SIZE = Size(prompt_words=(3, 6), answer_tokens=(4, 8), clients=4, max_requests=2_000, drain_s=10.0)
SECONDS = 0.4  # of a load: a request here takes some 20 ms


def parsed(*arguments: str, tenants: int = 1) -> Target:
    parser = argparse.ArgumentParser()
    add_target_arguments(parser)
    return target_of(parser, parser.parse_args(arguments), tenants)


def target(url: str, *more: str) -> Target:
    keys = [f"--key={tenant}={key}" for tenant, key in KEYS.items()]
    return parsed("--url", url, "--model", "m", *keys, *more)


def request(made: bytes) -> tuple[str, dict[str, str], dict[str, Any]]:
    head, _, body = made.partition(b"\r\n\r\n")
    first, *lines = head.decode().splitlines()
    return first, dict(text.split(": ", 1) for text in lines), json.loads(body)


# How it is asked.


@pytest.mark.parametrize(
    ("url", "path", "where", "port"),
    [
        ("http://host", "/v1/chat/completions", "host", 80),
        ("http://host:4000/", "/v1/chat/completions", "host:4000", 4000),
        ("http://host:4000/v1", "/v1/chat/completions", "host:4000", 4000),
        ("https://host/gateway/v1/", "/gateway/v1/chat/completions", "host", 443),
        ("http://[::1]:81/gateway", "/gateway/v1/chat/completions", "[::1]:81", 81),
    ],
)
def test_an_address_is_taken_with_or_without_its_version(url: str, path: str, where: str, port: int) -> None:
    found = target(url)
    assert (found.path, found.where, found.port) == (path, where, port)
    assert (found.tls is not None) == url.startswith("https")
    first, headers, body = request(found.request_bytes("light", "", "a b", 5))
    assert first == f"POST {path} HTTP/1.1"
    assert headers["host"] == where
    assert headers["authorization"] == f"Bearer {KEYS['light']}"
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"]) == ("m", 5)
    assert "priority" not in body


def test_a_tenant_stands_over_its_class_and_a_class_over_all() -> None:
    found = target(
        "http://host", "--priority", "high=0", "--priority", "low=low", "--field", "all:priority=5",
        "--header", "all:X-Team=any", "--header", "heavy:x-team=h", "--field", "heavy:user=h",
        "--field", 'all:extra={"a":[1]}',
    )  # fmt: skip
    _, headers, body = request(found.request_bytes("light", "high", "a", 1))
    assert (headers["x-team"], body["priority"], body["extra"], "user" in body) == ("any", 0, {"a": [1]}, False)
    _, headers, body = request(found.request_bytes("heavy", "low", "a", 1))
    assert (headers["x-team"], body["priority"], body["user"]) == ("h", "low", "h")
    assert request(found.request_bytes("heavy", "normal", "a", 1))[2]["priority"] == 5


def test_keys_and_values_of_headers_are_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEAVY", "from-the-environment")
    found = parsed(
        "--url", "http://host", "--model", "m", "--key", "light=", "--key", "heavy=env:HEAVY",
        "--header", "light:x-api-key=hidden",
    )  # fmt: skip
    assert found.keys == {"light": "", "heavy": "from-the-environment"}
    _, headers, _ = request(found.request_bytes("light", "", "a", 1))
    assert headers["x-api-key"] == "hidden"
    assert "authorization" not in headers
    shown = f"{found!r} {json.dumps(found.conditions())}"
    assert "hidden" not in shown
    assert "from-the-environment" not in shown
    assert found.conditions()["tenants_with_a_key"] == ["heavy"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "http://host", "--key", "a=b"],  # no model
        ["--url", "ftp://host", "--model", "m", "--key", "a=b"],
        ["--url", "http://user:secret@host", "--model", "m", "--key", "a=b"],
        ["--url", "http://host", "--model", "m"],  # nobody asks
        ["--url", "http://host", "--model", "m", "--key", "a"],
        ["--url", "http://host", "--model", "m", "--key", "a=b", "--key", "a=c"],
        ["--url", "http://host", "--model", "m", "--key", "high=b"],
        ["--url", "http://host", "--model", "m", "--key", "a=env:NOWHERE_TO_BE_FOUND"],
        ["--url", "http://host", "--model", "m", "--key", "a=b", "--header", "b:x=1"],
        ["--url", "http://host", "--model", "m", "--key", "a=b", "--header", "a:x=1\r\nhost: other"],
        ["--url", "http://host", "--model", "m", "--key", "a=b", "--priority", "highest=1"],
    ],
)
def test_a_command_line_that_makes_no_sense_ends_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*arguments)
    assert ended.value.code == 2


def test_an_endpoint_is_asked_for_by_its_address() -> None:
    parser = argparse.ArgumentParser()
    add_target_arguments(parser)
    assert not is_asked_for(parser, parser.parse_args([]))
    assert is_asked_for(parser, parser.parse_args(["--url", "http://host"]))
    with pytest.raises(SystemExit):
        is_asked_for(parser, parser.parse_args(["--model", "m"]))


def test_sizes_are_bounded_and_lengths_within_them() -> None:
    parser = argparse.ArgumentParser()
    add_size_arguments(parser)
    size = size_of(parser.parse_args(["--prompt-words", "5-9", "--answer-tokens", "7", "--max-requests", "10"]))
    assert (size.prompt_words, size.answer_tokens, size.max_requests) == ((5, 9), (7, 7), 10)
    lengths = size.lengths(1)
    assert {output for _, output in lengths} == {7}
    assert {prompt for prompt, _ in lengths} == {5, 6, 7, 8, 9}
    for wrong in (["--clients", "0"], ["--seconds", "0"], ["--prompt-words", "9-5"], ["--rate", "-1"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)


# How its answers are read.


def read(answer: str, cut: int = 1_000_000) -> AnswerReader:
    """The events of a stream, in pieces of so many bytes; each stamp is how many pieces have come."""
    pieces = 0
    reader = AnswerReader(lambda: float(pieces), lenient=True)
    data = f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\n\r\n{answer}".encode()
    for begin in range(0, len(data), cut):
        pieces += 1
        reader.feed(data[begin : begin + cut])
    return reader


FIRST_TOKEN = (
    ': comment\r\n\r\ndata: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\r\n\r\n'
    'data: {"choices": [{"delta": {"role": "assistant", "content": "a"}}], '
    '"usage": {"prompt_tokens": 7, "completion_tokens": 1}}\r\n\r\n'
)
ANSWER = (
    f'{FIRST_TOKEN}data: {{"choices": [{{"delta": {{"reasoning_content": "b"}}}}], "usage": null}}\r\n\r\n'
    'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
    'data: {"choices": [{"index": 0, "delta": {}}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\n'
    "data: [DONE]\r\n\r\n"
)


@pytest.mark.parametrize("cut", [1, 2, 7, 64, 1_000_000])
def test_a_stream_of_any_server_is_read_however_it_is_cut(cut: int) -> None:
    reader = read(ANSWER, cut)
    assert len(reader.stamps) == 2
    assert reader.usage == Usage(7, 2)
    assert reader.done
    assert reader.complete
    assert reader.body == b""


def test_usage_in_a_stream_counts_when_it_breaks_later() -> None:
    reader = read(FIRST_TOKEN)
    assert reader.usage == Usage(7, 1)
    assert not reader.done


@pytest.mark.parametrize(
    "event", ['{"error": {"message": "engine died"}}', "no JSON", "[1]", '{"choices": [], "error": "x"}']
)
def test_an_error_in_a_stream_is_kept_as_what_is_wrong(event: str) -> None:
    assert event.encode() in read(f"data: {event}\n\ndata: [DONE]\n\n").body


# That no bound is passed.


def offers(count: int, span_s: float = SECONDS) -> list[Offer]:
    return [Offer(number, span_s * number / count, "", number % 2, 3, 4 + number % 5) for number in range(count)]


def seen_of(endpoint: FakeEndpoint, requests: list[Offer], size: Size = SIZE, **spans: Any) -> Seen:
    with serving(endpoint) as url:
        return Traffic(target(url), size, 1).open(requests, **({"window_s": SECONDS} | spans))


def test_every_token_that_a_server_says_it_made_is_counted_and_no_word() -> None:
    endpoint = FakeEndpoint(TENANT_OF)
    seen = seen_of(endpoint, offers(40))
    assert {flight.outcome for flight in seen.flights} == {Ended.FINISHED}
    for number, tenant in enumerate(KEYS):
        usages = [flight.usage for flight in seen.finished if flight.offer.tenant == number]
        counted = sum(usage.prompt_tokens + 2 * usage.completion_tokens for usage in usages if usage)
        assert counted == endpoint.made[tenant]
    assert seen.uncounted() == {"finished_without_usage": 0, "broken_without_usage": 0}


def test_a_refusal_is_counted_with_its_status() -> None:
    endpoint = FakeEndpoint(TENANT_OF, refuses=lambda asked: asked.tenant == "heavy")
    figures = seen_of(endpoint, offers(20)).clients_figures()
    assert figures["outcomes"] == {"finished": 10, "refused": 10}
    assert (figures["refusals"], figures["refusal_reasons"], figures["failed"]) == (10, {"status 429": 10}, 0)


def test_a_client_of_a_closed_loop_comes_again_after_a_refusal() -> None:
    turned_away: set[str] = set()

    def once(asked: Asked) -> bool:
        prompt = str(asked.body["messages"])
        return prompt not in turned_away and not turned_away.add(prompt)

    endpoint = FakeEndpoint(TENANT_OF, refuses=once)
    with serving(endpoint) as url:
        requests = (Offer(number, 0.0, "", 0, 6, 4) for number in range(1_000))
        seen = Traffic(target(url), SIZE, 1).closed(requests, staying={"": 2}, window_s=1.5)
    assert seen.finished
    assert all(flight.first is not None and flight.first - flight.due >= RETRY_S for flight in seen.finished)
    assert seen.clients_figures()["refusals"] == len(endpoint.refused)


@pytest.mark.parametrize(("usage", "counted"), [("last", 0), ("every", 2)])
def test_a_stream_that_breaks_fails_and_counts_the_usage_of_its_chunks(usage: str, counted: int) -> None:
    endpoint = FakeEndpoint(TENANT_OF, usage=usage, breaks=lambda asked: asked.tenant == "light")
    seen = seen_of(endpoint, offers(10))
    broken = [flight for flight in seen.flights if flight.outcome is Ended.FAILED]
    assert {flight.offer.tenant for flight in broken} == {0}
    assert len(broken) == seen.failures()["failed"] == 5
    assert [flight.usage.completion_tokens if flight.usage else 0 for flight in broken] == [counted] * 5
    assert seen.uncounted()["broken_without_usage"] == (0 if counted else 5)


def test_what_waits_at_the_end_of_the_drain_is_hung_up_on_and_has_not_failed() -> None:
    endpoint = FakeEndpoint(TENANT_OF, slots=0)
    size = Size(prompt_words=(3, 6), answer_tokens=(4, 8), drain_s=0.2)
    with serving(endpoint) as url:
        seen = Traffic(target(url), size, 1).open(offers(10), window_s=SECONDS)
        # the server's thread has to see the connections closed
        wait_until(lambda: [asked.gone for asked in endpoint.asked], 10.0, "all are gone", wanted=[True] * 10)
    assert (seen.failures()["unanswered"], seen.failures()["failed"]) == (10, 0)


def test_those_without_a_first_token_leave_when_the_load_ends_and_others_run_on() -> None:
    endpoint = FakeEndpoint(TENANT_OF, slots=1)
    seen = seen_of(endpoint, [Offer(number, 0.0, "", 0, 3, 120) for number in range(5)], leave_at_end=True)
    assert sorted(flight.outcome for flight in seen.flights) == [Ended.ABANDONED] * 4 + [Ended.FINISHED]
    assert [flight.usage for flight in seen.finished] == [Usage(9, 120)]


def test_more_requests_than_are_allowed_are_not_sent() -> None:
    endpoint = FakeEndpoint(TENANT_OF)
    size = Size(prompt_words=(3, 6), answer_tokens=(4, 8), max_requests=5)
    with pytest.raises(BenchmarkError, match="--max-requests"):
        seen_of(endpoint, offers(6), size)
    assert endpoint.asked == []
    with serving(endpoint) as url, pytest.raises(BenchmarkError, match="5 requests"):
        Traffic(target(url), size, 1).closed(offers(100), clients=2, window_s=60.0)
    assert len(endpoint.asked) == 5


def test_an_endpoint_that_is_not_there_gives_no_figures() -> None:
    with pytest.raises(BenchmarkError, match="no connection"):
        Traffic(target("http://127.0.0.1:1"), SIZE, 1).probe()


def test_capacity_is_what_a_closed_loop_gets_through() -> None:
    """Brute force: the requests that ended in the last two thirds, by the flights themselves."""
    endpoint = FakeEndpoint(TENANT_OF)
    requests = (Offer(number, 0.0, "", 0, 3, 5) for number in range(1_000))
    with serving(endpoint) as url:
        per_s, seen = Traffic(target(url), SIZE, 1).capacity(requests, 0.9)
    ended = [flight for flight in seen.flights if 0.3 <= flight.ended - seen.began < 0.9]
    assert per_s == pytest.approx(len(ended) / 0.6)
    assert per_s > 0


def test_the_clients_own_lateness_is_the_time_from_due_to_sent() -> None:
    seen = seen_of(FakeEndpoint(TENANT_OF), offers(100))
    late = sorted((flight.sent - flight.due) * 1e3 for flight in seen.flights)
    figures = seen.clients_figures()["generator_late_ms"]
    assert figures["n"] == 100
    assert figures["p99"] == pytest.approx(late[98], rel=1e-3)
    assert figures["p50"] == pytest.approx(late[49], rel=1e-3)
