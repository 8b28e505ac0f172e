"""A client gets of a request that was stopped, once or several times, the answer of an undisturbed one; on vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e import stopped_requests
from tests.e2e.assembled import assembled, assembled_message, assembled_response
from tests.e2e.continuations import found
from tests.requires import requires

requires("vllm")

NAMES = list(stopped_requests.requests([]))


def answer_of(name: str, text: str) -> dict[str, Any]:
    if name.startswith("whole"):
        whole: dict[str, Any] = json.loads(text)
        return whole
    if "messages" in name:
        return assembled_message(text)
    return assembled_response(text) if "responses" in name else assembled(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_request_answers_as_an_undisturbed_one(name: str) -> None:
    undisturbed, *runs = found()["stopped"][name]
    assert undisturbed["moved"] == 0
    assert "ID" in undisturbed["text"]
    for run in runs:
        assert answer_of(name, run["text"]) == answer_of(name, undisturbed["text"])
        assert (run["tokens"], run["losses"], run["stayed"]) == (undisturbed["tokens"], 0, 0)
    once, often = runs
    assert once["moved"] == 1
    assert 2 <= often["moved"] <= len(stopped_requests.STOPS[1])  # a busy machine sees some of its tokens late


def test_the_requests_are_what_they_are_called() -> None:
    """Else their answers would be equal for no reason."""
    answers = {name: answer_of(name, found()["stopped"][name][0]["text"]) for name in NAMES}
    assert answers["whole_chat_tool"]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert answers["whole_chat"]["created"] == stopped_requests.CREATED
    assert answers["whole_completion"]["choices"][0]["finish_reason"] == "stop"
    assert answers["whole_completion"]["choices"][0]["stop_reason"]
    assert answers["whole_chat_schema"]["choices"][0]["message"]["content"].lstrip().startswith("{")
    calls = answers["streamed_chat_tool"]["choices"][0]["delta"]["tool_calls"].values()
    assert {call["function"]["name"] for call in calls} == {"weather"}
    assert all("ID-" in call["id"] for call in calls)
    assert answers["whole_messages"]["content"][0]["text"] == answers["streamed_messages"]["content"][0]["deltas"]
    assert answers["whole_messages_schema"]["content"][0]["text"].startswith('{"city"')
    (call,) = (block for block in answers["whole_messages_tool"]["content"] if block["type"] == "tool_use")
    assert call["input"]["city"]
    plain, penalized = (
        answers[name]["choices"][0]["message"]["content"] for name in ("whole_chat", "whole_chat_penalties_seeded")
    )
    assert plain != penalized
    first, second = answers["streamed_chat_pair"]["choices"].values()
    assert first["delta"]["content"] != second["delta"]["content"]
    assert len(answers["streamed_chat_logprobs"]["choices"][0]["logprobs"]["content"]) == stopped_requests.TOKENS


@pytest.mark.parametrize("name", stopped_requests.STAYING)
def test_a_request_that_would_lose_something_is_not_stopped(name: str) -> None:
    undisturbed, run = found()["staying"][name]
    assert run["stayed"] > 0
    assert (run["moved"], run["tokens"]) == (0, undisturbed["tokens"])


def test_requests_of_the_lowest_class_stop_for_others_and_answer_in_full() -> None:
    queued = found()["queued"]
    assert queued["statuses"] == [200, 200]
    assert queued["overtaken"]
    assert 1 <= sum(run["preempted"] for run in queued["answers"]) <= 2
    for number, (run, undisturbed) in enumerate(zip(queued["answers"], queued["undisturbed"], strict=True)):
        name = "whole" if number % 2 else "streamed"
        assert answer_of(name, run["text"]) == answer_of(name, undisturbed["text"])
