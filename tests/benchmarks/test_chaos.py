"""The plan of faults, what a client makes of an answer, and the account of a run, on answers and looks made by hand."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.answers import Answer, Malformed, duplicated, read
from benchmarks.chaos.clients import Counts, Cut, Different, Paused, Refused, refusal
from benchmarks.chaos.figures import KEYS, RouterCounts, longest_pauses, missed, p99, result
from benchmarks.chaos.main import configuration
from benchmarks.chaos.plan import AT_EDGE, Act, Fault, acts_of, due, signal_of
from benchmarks.chaos.questions import Api, Question, questions
from benchmarks.chaos.victims import Hit
from serve_app.settings import parse

QUESTION = Question(1, Api.CHAT, True, ("q1",), 4, {})


def chunk(**delta: Any) -> str:
    end = delta.pop("end", None)
    choice = {"index": 0, "delta": delta, "finish_reason": end}
    return "data: " + json.dumps({"id": "chatcmpl-1", "created": 7, "choices": [choice]}) + "\n\n"


USAGE = (
    'data: {"id": "chatcmpl-1", "created": 7, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
)
STREAM = chunk(role="assistant", content="") + chunk(content="a ") + chunk(content="b", end="length") + USAGE
DONE = "data: [DONE]\n\n"


def response_event(number: int, kind: str, **more: Any) -> str:
    return f"event: {kind}\ndata: " + json.dumps({"type": kind, "sequence_number": number, **more}) + "\n\n"


def response_stream(last: int = 2, text: str = "a b") -> str:
    output = [{"content": [{"text": "a b"}]}]
    whole = {"output": output, "status": "completed", "usage": {"input_tokens": 3, "output_tokens": 2}}
    return (
        response_event(0, "response.created")
        + response_event(1, "response.output_text.delta", delta=text)
        + response_event(last, "response.completed", response=whole)
    )


@given(st.randoms(use_true_random=False), st.sets(st.sampled_from(sorted(Fault)), min_size=1, max_size=7))
def test_kinds_that_cannot_be_hit_now_hold_up_no_others(draw: random.Random, possible: set[Fault]) -> None:
    act = Act(tuple(Fault), True, 1.0)
    done = Counter[Fault]()
    for _ in range(10 * len(possible)):
        done[next(fault for fault in due(act, done, draw) if fault in possible)] += 1
    assert dict(done) == dict.fromkeys(possible, 10)


@given(st.randoms(use_true_random=False), st.integers(1, 5))
def test_a_kind_that_was_long_impossible_comes_first(draw: random.Random, rounds: int) -> None:
    act = Act(tuple(Fault), True, 1.0)
    done = Counter(dict.fromkeys(Fault, rounds)) - Counter([Fault.ENGINE])
    assert due(act, done, draw)[0] is Fault.ENGINE
    assert set(due(act, done, draw)) == set(Fault)


def test_connections_are_cut_only_where_requests_have_a_key_to_be_repeated_by() -> None:
    assert [(act.keyed, bool(AT_EDGE & set(act.faults))) for act in acts_of(list(Fault))] == [
        (False, False),
        (True, True),
    ]
    assert [act.keyed for act in acts_of([Fault.ROUTER])] == [True]
    assert [act.keyed for act in acts_of([Fault.ENGINE])] == [False]


def test_what_is_ended_is_killed_and_asked_to_end_in_turn() -> None:
    assert [signal_of(Fault.ENGINE_CORE, done) for done in range(3)] == [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL]
    assert {signal_of(Fault.FREEZE, done) for done in range(3)} == {signal.SIGSTOP}
    assert {signal_of(Fault.DRAIN, done) for done in range(3)} == {None}


def test_the_pool_has_requests_of_all_kinds() -> None:
    pool = questions(60, tuple(Api), (20, 90), "tiny", seed=1)
    assert pool == questions(60, tuple(Api), (20, 90), "tiny", seed=1)
    assert {(one.api, one.stream) for one in pool} == {(api, stream) for api in Api for stream in (True, False)}
    assert {"stop", "logprobs"} <= {field for one in pool for field in one.body}
    assert {len(one.prompts) for one in pool} == {1, 2}
    assert all(one.body["temperature"] == 0 and 20 <= one.tokens <= 90 for one in pool)


def test_a_stream_and_a_document_of_one_answer_are_equal() -> None:
    document = {
        "choices": [{"index": 0, "message": {"content": "a b"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    whole = Answer(("a b",), ("length",), (3, 2))
    assert read(Api.CHAT, (": a comment\n\n" + STREAM + DONE).encode(), stream=True) == whole
    assert read(Api.CHAT, json.dumps(document).encode(), stream=False) == whole
    assert read(Api.RESPONSES, response_stream().encode(), stream=True) == Answer(("a b",), ("completed",), (3, 2))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (STREAM, "breaks off after"),
        (STREAM + DONE[:-4], "breaks off in an event"),
        (STREAM.replace("chatcmpl-1", "chatcmpl-2", 1) + DONE, "several answers"),
        (chunk(role="assistant") + STREAM + DONE, "begins twice"),
        (STREAM + chunk(content="c") + DONE, "goes on after its end"),
        (STREAM + USAGE + DONE, "2 usages"),
        (chunk(role="assistant") + USAGE + DONE, "of which ended"),
    ],
)
def test_what_is_not_one_whole_stream_is_no_answer(text: str, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        read(Api.CHAT, text.encode(), stream=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (response_stream(last=3), "gapless"),
        (response_stream(text="a a b"), "deltas"),
        (response_stream().partition("event: response.completed")[0], "breaks off"),
    ],
)
def test_what_is_not_one_whole_response_is_no_answer(text: str, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        read(Api.RESPONSES, text.encode(), stream=True)


def test_an_error_in_a_stream_is_reported_by_its_code() -> None:
    with pytest.raises(Malformed) as raised:
        read(Api.CHAT, (STREAM + 'data: {"error": {"code": "engine_failed"}}\n\n').encode(), stream=True)
    assert raised.value.code == "engine_failed"


@given(st.text("abc ", max_size=12), st.text("abc ", min_size=1, max_size=6), st.text("abc ", max_size=12))
def test_a_repeated_piece_is_found_wherever_it_is(before: str, piece: str, after: str) -> None:
    once = Answer((before + piece + after,), ("length",), (1, 1))
    twice = Answer((before + 2 * piece + after,), ("length",), (1, 1))
    assert len(duplicated(once, twice)) == len(piece)
    assert duplicated(once, once) == duplicated(twice, once) == ""


def test_only_a_routers_death_and_a_refusal_are_repeated() -> None:
    def of(status: int, code: str, headers: dict[str, str] | None = None) -> Exception:
        return refusal(status, headers or {}, json.dumps({"error": {"code": code}}).encode())

    assert isinstance(of(502, "router_lost"), Cut)
    refused = of(503, "no_quota", {"retry-after": "3"})
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retry_s) == ("no_quota", 3.0)
    assert isinstance(of(409, "idempotency_run_lost"), Malformed)
    assert isinstance(of(502, "engine_failed"), Malformed)
    assert isinstance(refusal(500, {}, b"no JSON"), Malformed)


def test_a_dead_routers_last_count_stays_in_the_sum() -> None:
    def metrics(**moved: float) -> str:
        lines = ["# TYPE serve_app_migrations counter"]
        return "\n".join(
            lines + [f'serve_app_migrations_total{{router="{n}",model="m"}} {v}' for n, v in moved.items()]
        )

    counts = RouterCounts()
    counts.look(metrics(a=3.0, b=1.0) + "\n")
    counts.look(metrics(b=4.0, c=2.0) + "\n")
    assert counts.of("serve_app_migrations_total") == 3 + 4 + 2
    assert counts.of("serve_app_not_continuable_total") == 0


def test_a_pause_is_of_the_last_fault_on_an_engine_before_its_end() -> None:
    hits = [Hit(Fault.ENGINE, 1, 10.0), Hit(Fault.ROUTER, 2, 15.0), Hit(Fault.FREEZE, 3, 20.0)]
    streams = [
        Paused("a", ((1.0, 0.2), (9.9, 0.5))),
        Paused("b", ((16.0, 0.3),)),
        Paused("c", ((20.1, 11.0),)),
        Paused("d", ((60.0, 1.0),)),
    ]
    assert longest_pauses(streams, hits) == {Fault.ENGINE: [500.0, 300.0], Fault.FREEZE: [11_000.0]}
    assert p99([1.0, 3.0, 2.0]) == 3.0
    assert p99([float(n) for n in range(1, 201)]) == 198.0


def test_the_result_has_the_keys_of_the_bars_and_a_missed_one_is_named() -> None:
    expected = Answer(("a b c",), ("length",), (3, 3))
    counts = Counts(requests=400, edge_retries=3)
    counts.different.append(Different(QUESTION, expected, Answer(("a b b c",), ("length",), (3, 3)), "r"))
    found = result(counts, [Hit(Fault.ENGINE, 1, 0.0)], RouterCounts(), {Fault.FREEZE: [12_500.0]}, 0, None)
    assert tuple(found) == KEYS
    assert (found["mismatched"], found["duplicated_tokens"], found["near_tie"], found["kills"]) == (1, 1, 0, 1)
    late = ["mismatched", "duplicated_tokens", "migrations", "edge_retries", "gap of freeze"]
    assert missed(found, at_edge=2) == late


@pytest.mark.parametrize("engine", ["vllm", "simulated"])
def test_what_is_measured_is_a_configuration(engine: str) -> None:
    settings = parse(configuration(engine, 2))
    (model,) = settings.models
    assert (model.engine, model.replicas.min_replicas, settings.router.replicas) == (engine, 2, 2)
