"""The load of class `low` and the figures of `benchmarks.preemption`, on answers and windows made by hand."""

from __future__ import annotations

import json

import pytest

from benchmarks.batch_fill.figures import MIN_P99, Counters, Window
from benchmarks.batch_fill.load import HIGH, Answered
from benchmarks.preemption.figures import LowRound, TokenCounters, result, verdicts
from benchmarks.preemption.low_load import Completion, LowAnswer, answer_of, completion_of, questions_of, wrong
from benchmarks.preemption.main import SHAPES, configuration, options_of, table_of
from serve_app.settings import parse

RIGHT = Completion("a b", "length", 3, 2)


def window(first_s: float, step_s: float = 0.01) -> Window:
    """Of 10 s, with as many answers as a p99 needs."""
    answers = [Answered(0.0, HIGH, first_s, first_s + 1.0)] * MIN_P99
    return Window(answers, Counters(0.0, 0.0, 0.0), Counters(10.0, 10.0 / step_s, 0.0))


def low(*answers: LowAnswer, preempted: int = 1, again: float = 5.0) -> LowRound:
    """A round in which each of these was stopped, and of 105 computed tokens some were computed before."""
    computed = TokenCounters(generated=50.0, prompts=55.0 - again, prefilled=55.0)
    return LowRound(answers, {answer.request_id: preempted for answer in answers}, computed)


def event(text: str, finish_reason: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish_reason}]}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"


def test_a_stream_and_a_whole_answer_say_the_same() -> None:
    whole = {"choices": [{"text": "a b", "finish_reason": "length"}], "usage": USAGE}
    assert completion_of(json.dumps(whole).encode(), is_stream=False) == RIGHT
    stream = event("a") + b": queue position=1\n\n" + event(" b", "length") + LAST + b"data: [DONE]\n\n"
    assert completion_of(stream, is_stream=True) == RIGHT


@pytest.mark.parametrize(
    "stream",
    [b"", event("a"), event("a") + b"data: [DONE]", event("a") + b"data: [DONE]\n\n", b'data: {"error":{}}\n\n'],
    ids=["empty", "cut", "cut in its end", "no usage", "error"],
)
def test_a_stream_that_is_cut_or_fails_is_no_answer(stream: bytes) -> None:
    with pytest.raises(ValueError, match=r"the stream has no end|no completion"):
        completion_of(stream, is_stream=True)


def test_a_part_of_the_questions_is_not_streamed() -> None:
    questions = questions_of(400, (20, 60), 1)
    assert questions == questions_of(400, (20, 60), 1)
    assert sum(not one.is_stream for one in questions) / 400 == pytest.approx(0.25, abs=0.06)
    assert len({one.prompt for one in questions}) == 400
    assert {one.tokens for one in questions} <= set(range(20, 61))


def test_the_result_compares_windows_answers_and_counters() -> None:
    answers = [LowAnswer(0, f"low-{number}", RIGHT) for number in range(20)]
    found = result([window(0.1), window(0.1)], [window(0.2), window(0.2)], [low(*answers)], {0: RIGHT})
    assert found["high_ttft_p99_excess_ms"] == 100.0
    assert found["two_steps_ms"] == 20.0
    assert (found["preempted"], found["wrong"], found["recomputed_share"]) == (20, 0, round(5 / 105, 4))
    assert verdicts(found) == {
        "high_ttft_p99_excess_ms": True,
        "preempted": True,
        "wrong": True,
        "recomputed_share": True,
    }
    json.dumps(found, allow_nan=False)
    assert table_of(found).row_count == 4 + 2 * 5


def test_each_bar_can_be_missed() -> None:
    broken = [LowAnswer(0, "other", Completion("a c", "length", 3, 2)), LowAnswer(0, "failed", None, "503")]
    found = result([window(0.1)], [window(0.221)], [low(*broken, again=11.0)], {0: RIGHT})
    assert (found["wrong"], found["preempted"]) == (2, 2)
    assert not any(verdicts(found).values())


def test_the_engines_counters_are_those_since_the_rounds_beginning() -> None:
    figures = {"generated_tokens": 9, "prompt_tokens": 4, "prefilled_tokens": 6, "running": 2}
    lines = [f'serve_app_engine_{name}_total{{model="tiny",replica="a"}} {n}' for name, n in figures.items()]
    found = TokenCounters.of("\n".join(lines) + "\n")
    assert found.since(TokenCounters(1.0, 1.0, 1.0)) == TokenCounters(8.0, 3.0, 5.0)


@pytest.mark.parametrize("engine", sorted(SHAPES))
def test_what_is_measured_has_no_guard_slots(engine: str) -> None:
    settings = parse(configuration(engine, SHAPES[engine]))
    assert settings.admission.guard_slots_share == 0.0
    assert (settings.models[0].engine, settings.models[0].max_num_seqs) == (engine, SHAPES[engine].slots)


def test_quick_means_shorter_windows() -> None:
    assert options_of(["--quick"]).quick
    assert options_of([]).engine == "vllm"


@pytest.mark.parametrize(
    ("response", "failure"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nfull", "503 b'full'"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ncut", "200 b'cut'"),
        (b"ConnectionRefusedError()", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "the stream has no end"),
    ],
)
def test_a_response_that_is_no_answer_is_a_failure_and_wrong(response: bytes, failure: str) -> None:
    (question,) = questions_of(1, (2, 2), 1)
    found = answer_of(0, "low", response, question)
    assert found.completion is None
    assert failure in found.failure
    assert wrong([found], {0: RIGHT}) == [found]
