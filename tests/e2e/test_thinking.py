"""A client of a model that thinks notices nothing when its engine is lost or stops for others, on vLLM."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e import stopped_requests, thinking
from tests.e2e.assembled import answer_of, assert_continued
from tests.e2e.test_preemption import answer_of as stopped_answer_of
from tests.e2e.thinking import found
from tests.requires import requires

requires("vllm")
pytestmark = pytest.mark.long  # an engine of its own


@pytest.mark.parametrize("name", thinking.CUT)
def test_a_continued_stream_with_a_thought_is_the_undisturbed_one(name: str) -> None:
    assert_continued(name, found()["cut"][name])


def parts_of(name: str) -> tuple[str, str]:
    """The thought and the text or the arguments of an undisturbed answer."""
    answer = answer_of(name, found()["cut"][name]["undisturbed"]["text"])
    if name.startswith("chat"):
        delta: dict[str, Any] = answer["choices"][0]["delta"]
        calls = delta.get("tool_calls", {})
        arguments = "".join(call["function"]["arguments"] for call in calls.values())
        return delta["reasoning"], delta.get("content", "") + arguments
    if name.startswith("messages"):
        thought, rest = answer["content"]
        return thought["deltas"], rest["deltas"]
    thought, *rest = answer["deltas"].values()
    return thought, "".join(rest)


@pytest.mark.parametrize("name", thinking.CUT)
def test_each_answer_has_a_thought_and_a_rest(name: str) -> None:
    """Else the answers would be equal for no reason."""
    thought, rest = parts_of(name)
    assert "</think>" not in thought
    assert len(thought) > thinking.BUDGET
    assert rest
    if name.endswith("schema"):
        assert re.match(thinking.STATION["pattern"], json.loads(rest))
    if name.endswith("tool"):
        assert rest.startswith('{"city"')


def test_a_budget_ends_the_thought() -> None:
    thought, _ = parts_of("chat_thinking")
    ended, _ = parts_of("chat_thinking_budget")
    assert thought.startswith(ended)
    assert ended != thought


@pytest.mark.parametrize("name", thinking.STOPPED)
def test_a_stopped_request_with_a_thought_answers_as_an_undisturbed_one(name: str) -> None:
    undisturbed, once, often = found()["stopped"][name]
    for run in (once, often):
        assert stopped_answer_of(name, run["text"]) == stopped_answer_of(name, undisturbed["text"])
        assert (run["tokens"], run["losses"], run["stayed"]) == (undisturbed["tokens"], 0, 0)
    assert (undisturbed["moved"], once["moved"]) == (0, 1)
    assert 2 <= often["moved"] <= len(stopped_requests.STOPS[1])  # a busy machine sees some of its tokens late
