"""null asks for nothing: in a message, a part, an item or a tool, it is as absent where the field need not be there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from pydantic import BaseModel

from tests.requires import requires

requires("vllm")

from serve_app.engine.responses_input import as_vllm_reads  # noqa: E402
from serve_app.engine.vllm_adapter.body_models import fault_of, validated  # noqa: E402
from serve_app.types import Operation  # noqa: E402

CHAT = Operation.CHAT
RESPONSES = Operation.RESPONSES
USER = {"role": "user", "content": "a"}


def items(*given: Any) -> dict[str, Any]:
    return {"input": [USER, *given]}


FUNCTION_TOOL = {"type": None, "function": {"name": "f", "description": None, "parameters": None}}
DETAIL = {"type": "image_url", "image_url": {"url": "data:", "detail": None}}


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        (CHAT, {"messages": [{**USER, "name": None}]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": None, "function_call": None}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, DETAIL]}]}),
        (CHAT, {"messages": [USER], "tools": [FUNCTION_TOOL], "tool_choice": "auto"}),
        (RESPONSES, items({"type": None, "role": "user", "content": "a"})),
        (
            RESPONSES,
            items({"type": None, "role": "user", "content": [{"type": "input_text", "text": "a"}], "status": None}),
        ),
        (RESPONSES, items({"type": "function_call_output", "call_id": "c", "output": "1", "id": None, "status": None})),
        (
            RESPONSES,
            items(
                {
                    "type": None,
                    "role": "assistant",
                    "id": "i",
                    "status": None,
                    "content": [{"type": "output_text", "text": "a", "annotations": None}],
                }
            ),
        ),
        (Operation.EMBEDDING, {"messages": [{**USER, "name": None}]}),
        (Operation.RERANK, {"query": "a", "documents": [{"content": [DETAIL]}]}),
        (Operation.TOKENIZE, {"messages": [{**USER, "name": None}], "tools": [FUNCTION_TOOL]}),
    ],
)
def test_null_in_a_field_that_need_not_be_there_is_as_absent(operation: Operation, body: dict[str, Any]) -> None:
    def read_as(body: dict[str, Any]) -> Any:
        body = as_vllm_reads(body) if operation is RESPONSES else body
        assert fault_of(operation, body) is None
        return plain(validated(operation, json.loads(json.dumps({"model": "m", **body}))))

    assert without_nulls(read_as(body)) == without_nulls(read_as(without_nulls(body)))


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """What a body was read as, without ids that are made for it."""
    if isinstance(value, BaseModel):
        return {name: plain(one) for name, one in value if name != "request_id"}
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [plain(one) for one in value]
    return value
