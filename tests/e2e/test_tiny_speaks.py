"""The built-in model answers what a new user asks it, through the whole stack."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e.stack import TINY
from tests.tiny_questions import CALLED, DESCRIBED, PERSON, QUESTIONS, WEATHER


def asked(question: str) -> dict[str, Any]:
    return {"model": TINY, "messages": [{"role": "user", "content": question}], "temperature": 0}


@pytest.mark.parametrize(("question", "words"), QUESTIONS.items(), ids=list(QUESTIONS))
def test_a_question_gets_its_answer_which_ends_by_itself(client: openai.OpenAI, question: str, words: str) -> None:
    (choice,) = client.chat.completions.create(**asked(question)).choices

    assert choice.finish_reason == "stop"
    assert words in (choice.message.content or "")


def test_a_sampled_answer_makes_sense_by_the_defaults(client: openai.OpenAI) -> None:
    """No temperature: that of the model's own generation_config.json."""
    question = {name: value for name, value in asked("What is serve-app?").items() if name != "temperature"}
    answers = client.chat.completions.create(**question, n=8).choices

    assert {choice.finish_reason for choice in answers} == {"stop"}
    assert sum("vLLM" in (choice.message.content or "") for choice in answers) >= 7


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_with_the_value_of_the_question(client: openai.OpenAI, choice: Any) -> None:
    (answer,) = client.chat.completions.create(**asked(CALLED), tools=[WEATHER], tool_choice=choice).choices

    assert answer.message.tool_calls
    (call,) = answer.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_an_answer_repeats_what_a_tool_has_found(client: openai.OpenAI) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    turns: list[Any] = [
        {"role": "user", "content": CALLED},
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    (answer,) = client.chat.completions.create(**asked(CALLED) | {"messages": turns}, tools=[WEATHER]).choices

    assert answer.finish_reason == "stop"
    assert "rain" in (answer.message.content or "")


def test_an_answer_under_a_schema_has_the_values_of_the_question(client: openai.OpenAI) -> None:
    schema = {"name": "person", "schema": PERSON, "strict": True}
    wanted: Any = {"type": "json_schema", "json_schema": schema}
    (answer,) = client.chat.completions.create(**asked(DESCRIBED), response_format=wanted).choices

    found = json.loads(answer.message.content or "")
    jsonschema.validate(found, PERSON)
    assert found == {"name": "Maria", "age": 31}
    assert answer.finish_reason == "stop"
