"""What a client assembles of a stream that two engines made is what one engine would have given it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.errors import EngineFailed
from serve_app.transport import NOT_CONTINUABLE
from tests.e2e import continued_streams
from tests.e2e.continuations import found
from tests.e2e.ended_core import ASKED
from tests.requires import requires

requires("vllm")

EXACT = [*(name for name, *_ in continued_streams.scenarios()), "completion_stop", "messages_stop"]
WRONG = [
    "too_few_events", "too_many_events", "no_groups", "unknown_tokens", "unknown_choice", "empty_group",
    "against_the_grammar", "beyond_the_end", "no_stream",
]  # fmt: skip
GROW = ("content", "text", "arguments")


def add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a delta, as OpenAI's clients do: texts and lists grow, tool calls by their index, the rest says the same."""
    for name, value in part.items():
        if name == "tool_calls":
            for call in value:
                add(whole.setdefault(name, {}).setdefault(call["index"], {}), call)
        elif isinstance(value, dict):
            add(whole.setdefault(name, {}), value)
        elif isinstance(value, list) or (name in GROW and value is not None):
            whole[name] = whole.get(name, type(value)()) + value
        elif value is not None and whole.setdefault(name, value) != value:
            raise AssertionError(f"{name}: {whole[name]!r} and then {value!r}")


def assembled(text: str) -> dict[str, Any]:
    """The answer in a stream of chat or completions."""
    *events, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    answer: dict[str, Any] = {"choices": {}}
    for event in events:
        chunk = json.loads(event.removeprefix("data: "))
        for choice in chunk.pop("choices"):
            add(answer["choices"].setdefault(choice.pop("index"), {}), choice)
        add(answer, chunk)
    return answer


def assembled_response(text: str) -> dict[str, Any]:
    """The answer in a stream of the Responses API."""
    answer: dict[str, Any] = {"deltas": {}, "events": []}
    for number, event in enumerate(text.split("\n\n")[:-1]):
        kind, _, data = event.partition("\ndata: ")
        document = json.loads(data)
        assert document.pop("sequence_number", number) == number
        if "delta" in document:
            item = document["item_id"]
            answer["deltas"][item] = answer["deltas"].get(item, "") + document["delta"]
        else:
            answer["events"].append((kind, document))
    return answer


def assembled_message(text: str) -> dict[str, Any]:
    """The message in a stream of Anthropic's API."""
    message: dict[str, Any] = {}
    kinds = []
    for event in text.split("\n\n")[:-1]:
        kind, _, data = event.partition("\ndata: ")
        document = json.loads(data)
        assert kind == f"event: {document['type']}"
        kinds.append(document["type"])
        match document["type"]:
            case "message_start":
                message = document["message"]
            case "content_block_start":
                assert document["index"] == len(message["content"])
                message["content"].append(document["content_block"] | {"deltas": ""})
            case "content_block_delta":
                delta = document["delta"]
                message["content"][document["index"]]["deltas"] += delta.get("text") or delta.get("partial_json")
            case "message_delta":
                message |= document["delta"] | {"end_usage": document["usage"]}
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    return message


def answer_of(name: str, text: str) -> dict[str, Any]:
    if name.startswith("messages"):
        return assembled_message(text)
    return assembled_response(text) if name.startswith("responses") else assembled(text)


@pytest.mark.parametrize("name", EXACT)
def test_a_continued_stream_is_the_undisturbed_one(name: str) -> None:
    undisturbed = found()["cut"][name]["undisturbed"]
    cuts = found()["cut"][name]["cuts"]
    assert undisturbed["failure"] == ""
    assert len(cuts) > 3
    for cut in cuts:
        assert cut["failure"] == ""
        assert cut["status"] == [200, *[0] * (len(cut["status"]) - 1)]
        assert answer_of(name, cut["text"]) == answer_of(name, undisturbed["text"])
        assert cut["usage"] == undisturbed["usage"]
        assert all(cut["made"][choice] == tokens for choice, tokens in undisturbed["made"].items())
    assert any(cut["new"] for cut in cuts)


def test_the_scenarios_are_what_they_are_called() -> None:
    """Else they would be equal for no reason."""
    answers = {name: answer_of(name, found()["cut"][name]["undisturbed"]["text"]) for name in EXACT}
    signs = answers["chat_characters"]["choices"][0]
    assert len(signs["logprobs"]["content"]) > len(signs["delta"]["content"]) == 9
    calls = answers["chat_tool"]["choices"][0]["delta"]["tool_calls"].values()
    assert {call["function"]["name"] for call in calls} == {"weather"}
    assert all(call["function"]["arguments"].startswith('{"city"') for call in calls)
    for choice in answers["chat_schema_pair"]["choices"].values():
        assert json.loads(choice["delta"]["content"])["city"]
    assert answers["completion_stop"]["choices"][0]["finish_reason"] == "stop"
    assert answers["completion_stop"]["choices"][0]["stop_reason"]
    first, second = answers["chat_seeded_pair"]["choices"].values()
    assert first["delta"]["content"] != second["delta"]["content"]
    assert len(answers["completion_prompts"]["choices"]) == 6
    plain, penalized = (answers[name]["choices"][0]["delta"]["content"] for name in ("chat", "chat_penalties"))
    assert plain != penalized
    assert answers["chat_tool_cached"]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert found()["cut"]["responses_tool"]["undisturbed"]["usage"][2] > 0
    assert answers["messages"]["stop_reason"] == "max_tokens"
    (block,) = answers["messages"]["content"]
    assert block["deltas"] == answers["chat"]["choices"][0]["delta"]["content"]
    assert answers["messages_schema"]["content"][0]["deltas"].startswith('{"city"')
    (call,) = (block for block in answers["messages_tool"]["content"] if block["type"] == "tool_use")
    assert call["name"] == "weather"
    assert call["deltas"].startswith('{"city"')
    assert answers["messages_stop"]["stop_reason"] == "stop_sequence"
    assert answers["messages_stop"]["stop_sequence"]


@pytest.mark.parametrize("name", continued_streams.INEXACT)
def test_what_cannot_be_continued_exactly_is_not(name: str) -> None:
    undisturbed = found()["cut"][name]["undisturbed"]
    cuts = found()["cut"][name]["cuts"]
    assert undisturbed["failure"] == ""
    assert [cut["failure"] for cut in cuts] == [NOT_CONTINUABLE] * len(cuts)
    assert all(cut["status"] == [] for cut in cuts)


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_gives_no_byte(name: str) -> None:
    assert found()["cut"][name]["failure"] == NOT_CONTINUABLE
    assert found()["cut"][name]["status"] == []


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_that_ends_with_sigterm_to_its_engine_core_is_a_loss(name: str) -> None:
    """vLLM ends it as if it were whole, with finish reason `abort`."""
    ended = found()["ended"][name]
    assert ended["failure"] == EngineFailed.code
    assert "abort" not in ended["text"]
    assert "[DONE]" not in ended["text"]
    assert "response.completed" not in ended["text"]
    assert "message_stop" not in ended["text"]
    assert not ended["text"].startswith("{")


def test_an_engine_goes_on_after_requests_that_do_not_fit() -> None:
    assert found()["continues"] is True
    assert assembled(found()["cut"]["after"]["text"]) == assembled(found()["cut"]["first"]["text"])
