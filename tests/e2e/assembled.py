"""What clients assemble of streams, and when a continued one is the undisturbed one."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.continued_streams import CUTS

GROW = ("content", "text", "arguments", "reasoning")


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
                _add_to_block(message["content"][document["index"]], document["delta"])
            case "message_delta":
                message |= document["delta"] | {"end_usage": document["usage"]}
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    return message


def _add_to_block(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta["type"]:
        case "signature_delta":
            assert block.setdefault("signature", "") == ""
            block["signature"] = delta["signature"]
        case "thinking_delta":
            block["deltas"] += delta["thinking"]
        case "input_json_delta":
            block["deltas"] += delta["partial_json"]
        case kind:
            assert kind == "text_delta"
            block["deltas"] += delta["text"]


def answer_of(name: str, text: str) -> dict[str, Any]:
    """The answer in the stream of a scenario, which is named by its API first."""
    if name.startswith("messages"):
        return assembled_message(text)
    return assembled_response(text) if name.startswith("responses") else assembled(text)


def assert_equal(name: str, cut: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    """A cut of a scenario that was continued, beside its undisturbed run (`continued_streams.summary`)."""
    assert cut["failure"] == ""
    assert cut["status"] == [200, *[0] * (len(cut["status"]) - 1)]
    assert answer_of(name, cut["text"]) == answer_of(name, undisturbed["text"])
    assert cut["usage"] == undisturbed["usage"]
    assert all(cut["made"][choice] == tokens for choice, tokens in undisturbed["made"].items())


def assert_continued(name: str, scenario: dict[str, Any]) -> None:
    """A scenario was cut at five places, each of them once, and its client noticed nothing."""
    assert scenario["undisturbed"]["failure"] == ""
    assert len(set(scenario["places"])) == len(scenario["places"]) == CUTS
    assert len(scenario["cuts"]) >= CUTS
    for cut in scenario["cuts"]:
        assert_equal(name, cut, scenario["undisturbed"])
    assert any(cut["new"] for cut in scenario["cuts"])
