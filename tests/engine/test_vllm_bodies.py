"""What vLLM makes of bodies that it does not foresee: an error of the request, or its answer."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.datastructures import State
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages

from serve_app.engine.responses_input import as_vllm_reads
from serve_app.engine.vllm_adapter import serving
from serve_app.transport import Submit
from serve_app.types import Operation


@pytest.mark.parametrize("part", [{"type": "text", "text": 5}, {"type": "none"}, 5, None])
def test_a_part_of_a_wrong_type_to_embed_is_an_error_of_validation(part: Any) -> None:
    """vLLM reads the parts lazily; pydantic panics if the adapter that made them is gone by then."""

    async def embed(request: Any, _: Any) -> Any:
        gc.collect()
        read = [list(message["content"]) for message in request.messages]
        return SimpleNamespace(body=repr(read).encode())

    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    submit = Submit(1, "r", Operation.EMBEDDING, body)
    with pytest.raises(ValidationError):
        asyncio.run(serving.answer(SimpleNamespace(), State({"serving_embedding": embed}), submit, False))  # type: ignore[arg-type]


TEXT = {"type": "output_text", "text": "Yes.", "annotations": []}
REFUSAL = {"type": "refusal", "refusal": "I cannot."}
IDS = {"type": "message", "id": "msg_1", "status": "completed"}


@pytest.mark.parametrize("more", [{}, {"type": "message"}, IDS], ids=["short", "typed", "as the API gave it"])
@pytest.mark.parametrize(
    ("parts", "reported"),
    [
        ([], ""),
        ([REFUSAL], "I cannot."),
        ([TEXT], "Yes."),
        ([TEXT, REFUSAL], "Yes.I cannot."),
        ([TEXT, TEXT], "Yes.Yes."),
    ],
    ids=["empty", "refusal", "text", "text and refusal", "two texts"],
)
def test_an_earlier_turn_of_the_assistant_is_read_whole(parts: list[Any], reported: str, more: dict[str, Any]) -> None:
    user = {"role": "user", "content": "Hi."}
    body = {"model": "m", "input": [user, {**more, "role": "assistant", "content": parts}, user]}
    before = copy.deepcopy(body)
    asked = ResponsesRequest.model_validate(as_vllm_reads(body))
    assert not isinstance(asked.input, str)
    messages = construct_input_messages(request_input=asked.input)
    assert messages == [user, {"role": "assistant", "content": reported}, user]
    assert body == before


@pytest.mark.parametrize(
    "input_value",
    [
        "Hi.",
        [{"role": "user", "content": []}],
        [{"role": "assistant", "content": "Yes."}],
        [{"type": "reasoning", "id": "r", "summary": []}, 5, None],
    ],
)
def test_what_is_no_such_turn_is_passed_on_as_it_is(input_value: Any) -> None:
    body = {"model": "m", "input": input_value}
    assert as_vllm_reads(body) == body


@pytest.mark.parametrize("part", [{"type": "input_image", "image_url": "x"}, {"type": "refusal", "refusal": 5}, 5])
def test_a_part_of_a_turn_that_is_not_known_is_passed_on(part: Any) -> None:
    (item,) = as_vllm_reads({"input": [{"role": "assistant", "content": [part, TEXT]}]})["input"]
    assert item["content"] == [part, TEXT]


@pytest.mark.parametrize("item", [{"type": "reasoning", "summary": []}, {"role": "assistant", "content": [TEXT]}])
def test_an_item_with_nulls_is_read_as_one_without_its_fields(item: dict[str, Any]) -> None:
    nulls = {"id": None, "status": None, "type": item.get("type")}
    for body in ({"input": [item]}, {"input": [{**item, **nulls}]}):
        asked = ResponsesRequest.model_validate(as_vllm_reads(body))
        assert not isinstance(asked.input, str)
        assert len(construct_input_messages(request_input=asked.input)) == 1


@pytest.mark.parametrize("more", [{}, {"detail": None}, {"detail": "low"}])
def test_an_image_of_a_tool_s_result_needs_no_detail(more: dict[str, Any]) -> None:
    """OpenAI's models of a result have it optional; it was a 400."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", **more}
    body = {"input": [{"type": "function_call_output", "call_id": "c", "output": [TEXT, image]}]}
    (item,) = as_vllm_reads(body)["input"]
    assert item["output"] == [TEXT, {**image, "detail": more.get("detail") or "auto"}]
    assert body["input"][0]["output"][1] == image


def test_an_error_of_vllm_is_the_request_s_and_says_so() -> None:
    submit = Submit(1, "r", Operation.RESPONSES, {"model": "m", "input": "Hi."})
    frame = serving.refusal(serving.error_response(IndexError("list index out of range"), submit), submit)
    assert (frame.status, frame.media) == (500, "json")
    error = json.loads(frame.body)["error"]
    assert (error["code"], error["type"]) == ("request_failed", "internal_server_error")
    assert error["message"].startswith("the engine could not handle this request")


def test_json_in_a_string_that_is_too_deep_for_a_parser_is_refused_as_the_client_s() -> None:
    """It was a 500: the arguments of an earlier tool call, an item of Responses, a structural tag."""
    submit = Submit(1, "r", Operation.CHAT, {"model": "m", "messages": []})
    with pytest.raises(RecursionError) as caught:
        json.loads("[" * 50_000)
    frame = serving.refusal(serving.error_response(caught.value, submit), submit)
    assert frame.status == 400
    error = json.loads(frame.body)["error"]
    assert (error["code"], error["type"]) == ("invalid_request_error", "invalid_request_error")
    assert "nested too deep" in error["message"]
