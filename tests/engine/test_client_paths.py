"""The path of what is wrong in a body, as the client sent it: every kind of request, told by vLLM's models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tests.requires import requires

requires("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.entrypoints.serve.engine.protocol import ErrorResponse  # noqa: E402

from serve_app.engine.responses_input import as_vllm_reads  # noqa: E402
from serve_app.engine.tiny_model import ensure_tiny_model  # noqa: E402
from serve_app.engine.vllm_adapter import serving  # noqa: E402
from serve_app.engine.vllm_adapter.body_models import fault_of, validated  # noqa: E402
from serve_app.engine.vllm_adapter.render_process import Reader, RenderSetup  # noqa: E402
from serve_app.errors import BadRequest  # noqa: E402
from serve_app.settings import ModelSettings  # noqa: E402
from serve_app.transport import Submit  # noqa: E402
from serve_app.types import Operation  # noqa: E402

CHAT = Operation.CHAT
TEXT = Operation.COMPLETION
RESPONSES = Operation.RESPONSES
EMBEDDING = Operation.EMBEDDING
SCORE = Operation.SCORE
RERANK = Operation.RERANK
USER = {"role": "user", "content": "a"}
FUNCTION = {"name": "f", "arguments": "{}"}
ROLES = "'developer', 'system', 'user', 'assistant', 'tool' or 'function'"


def parts(*given: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(given)}]}


def calls(*given: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "tool_calls": list(given)}]}


def items(*given: Any) -> dict[str, Any]:
    return {"input": [USER, *given]}


def turn(*given: Any, **more: Any) -> dict[str, Any]:
    return items({"role": "assistant", "content": list(given), **more})


def schema(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], "response_format": {"type": "json_schema", **more}}


WRONG: list[tuple[Operation, dict[str, Any], str, str]] = [
    (CHAT, {}, "messages", "required"),
    (CHAT, {"messages": [USER, "hi"]}, "messages.1", "an object"),
    (CHAT, {"messages": [USER, None]}, "messages.1", "an object"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages.0.role", "required"),
    (CHAT, {"messages": [{"role": None, "content": "hi"}]}, "messages.0.role", ROLES),
    (CHAT, {"messages": [{"role": ["user"], "content": "hi"}]}, "messages.0.role", ROLES),
    (CHAT, {"messages": [USER, {"role": "user", "content": 5}]}, "messages.1.content", "string"),
    (CHAT, parts({"type": "image_url"}), "messages.1.content.0.image_url", "required"),
    (CHAT, parts({"type": "image_url", "image_url": {}}), "messages.1.content.0.image_url.url", "required"),
    (
        CHAT,
        parts({"type": "input_audio", "input_audio": {"format": "wav"}}),
        "messages.1.content.0.input_audio.data",
        "",
    ),
    (CHAT, parts({"type": "text", "text": 5}), "messages.1.content.0.text", "string"),
    (CHAT, parts({"type": "text"}), "messages.1.content.0.text", "required"),
    (CHAT, parts({"type": "text"}, role="system"), "messages.1.content.0.text", "required"),
    (CHAT, parts({"type": "refusal"}, role="assistant"), "messages.1.content.0.refusal", "required"),
    (CHAT, parts({"type": "photo", "text": "a"}), "messages.1.content.0.type", "'text', 'image_url'"),
    (CHAT, parts({"text": "a"}), "messages.1.content.0.type", "required"),
    (CHAT, parts({"type": "text", "text": "a"}, 5), "messages.1.content.1", "an object"),
    (CHAT, calls({"type": "function", "function": FUNCTION}), "messages.1.tool_calls.0.id", "required"),
    (CHAT, calls({"id": "c", "type": "function"}), "messages.1.tool_calls.0.function", "required"),
    (CHAT, calls({"id": "c", "function": FUNCTION}), "messages.1.tool_calls.0.type", "required"),
    (
        CHAT,
        calls({"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}),
        "messages.1.tool_calls.0.function.arguments",
        "string",
    ),
    (CHAT, calls(5), "messages.1.tool_calls.0", "an object"),
    (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": 5}]}, "messages.1.tool_calls", "list"),
    (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": {"id": "c"}}]}, "messages.1.tool_calls", "list"),
    (CHAT, {"messages": [USER], "tools": [{"type": "function"}]}, "tools.0.function", "required"),
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "required"),
    (
        CHAT,
        {
            "messages": [USER],
            "tools": [{"type": "function"}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
        "tools.0.function",
        "required",
    ),
    (CHAT, {"messages": [USER], "tools": {"type": "function"}}, "tools", "list"),
    (CHAT, {"messages": [USER], "response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    (CHAT, {"messages": [USER], "response_format": "json"}, "response_format", ""),
    (CHAT, schema(json_schema={"schema": {}}), "response_format.json_schema.name", "required"),
    (CHAT, {"messages": [USER], "stop": ["a", 5]}, "stop.1", "string"),
    (CHAT, {"messages": [USER], "logit_bias": {"5": "much"}}, "logit_bias.5", "number"),
    (
        CHAT,
        {"messages": [USER], "stream": True, "stream_options": {"include_usage": 5}},
        "stream_options.include_usage",
        "",
    ),
    (CHAT, {"messages": [USER], "temperature": "warm"}, "temperature", "number"),
    (TEXT, {"prompt": 5}, "prompt", "string"),
    (TEXT, {"prompt": [5.5]}, "prompt.0", ""),
    (TEXT, {"prompt": [[1, "a"]]}, "prompt.0.1", "integer"),
    (TEXT, {"prompt": "a", "echo": "maybe"}, "echo", "boolean"),
    (RESPONSES, {}, "input", "required"),
    (RESPONSES, {"input": 5}, "input", "string or a valid list"),
    (RESPONSES, {"input": {"role": "user", "content": "a"}}, "input", "string or a valid list"),
    (RESPONSES, {"input": [""]}, "input.0", "an object"),
    (RESPONSES, items({"type": "function_call", "name": "f", "arguments": "{}"}), "input.1.call_id", "required"),
    (
        RESPONSES,
        items({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}),
        "input.1.arguments",
        "string",
    ),
    (RESPONSES, items({"type": "function_call_output", "call_id": "c"}), "input.1.output", "required"),
    (RESPONSES, items({"type": "reasoning"}), "input.1.summary", "required"),
    (RESPONSES, items({"type": "photo"}), "input.1.type", "'message'"),
    (RESPONSES, items({"role": "robot", "content": "a"}), "input.1.role", "'user'"),
    (RESPONSES, items({"role": "user"}), "input.1.content", "required"),
    (RESPONSES, items({"role": "user", "content": 5}), "input.1.content", "string"),
    (RESPONSES, items({"type": None, "role": "user", "content": None}), "input.1.content", "string"),
    (RESPONSES, items({"type": None, "role": None, "content": "a"}), "input.1.role", "'user'"),
    (
        RESPONSES,
        items({"role": "user", "content": [{"type": "text", "text": "a"}]}),
        "input.1.content.0.type",
        "'input_text'",
    ),
    (RESPONSES, items({"role": "user", "content": [{"type": "input_text"}]}), "input.1.content.0.text", "required"),
    (RESPONSES, turn({"type": "output_text"}), "input.1.content.0.text", "required"),
    (RESPONSES, turn({"type": "output_text"}, type="message"), "input.1.content.0.text", "required"),
    (RESPONSES, turn({"type": "refusal", "refusal": 5}), "input.1.content.0.refusal", "string"),
    (RESPONSES, turn({"text": "a"}), "input.1.content.0.type", "required"),
    (RESPONSES, turn({"type": "photo"}), "input.1.content.0.type", "'output_text'"),
    (
        RESPONSES,
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}},
        "text.format.schema",
        "required",
    ),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema'"),
    (RESPONSES, {"input": "a", "tools": [{"type": "function"}]}, "tools.0.name", "required"),
    (RESPONSES, {"input": "a", "tools": [{"type": "photo"}]}, "tools.0.type", "'function'"),
    (RESPONSES, {"input": "a", "reasoning": {"effort": "most"}}, "reasoning.effort", "'low'"),
    (RESPONSES, {"input": "a", "include": ["everything"]}, "include.0", "'message.output_text.logprobs'"),
    (RESPONSES, {"input": "a", "metadata": {"b": 5}}, "metadata.b", "string"),
    (EMBEDDING, {}, "input", "required"),
    (EMBEDDING, {"input": 5}, "input", "string"),
    (EMBEDDING, {"input": [{"role": "user", "content": [{"type": "text"}]}]}, "input.0.content.0.text", "required"),
    (EMBEDDING, {"input": "a", "dimensions": "many"}, "dimensions", "integer"),
    (EMBEDDING, parts({"type": "input_text", "text": "a"}), "messages.1.content.0.type", "'text'"),
    (EMBEDDING, parts({"type": "text", "text": 5}), "messages.1.content.0.text", "string"),
    (EMBEDDING, {"messages": [[USER], [USER, ""]]}, "messages.1.1", "an object"),
    (SCORE, {"queries": "a", "documents": ["b", {"content": [{"type": "text"}]}]}, "documents.1.content.0.text", ""),
    (SCORE, {"queries": "a", "items": {"content": [{"type": "photo"}]}}, "items.content.0.type", "'text'"),
    (SCORE, {"text_1": {"content": 5}, "text_2": "b"}, "text_1.content", "list"),
    (SCORE, {"data_1": {}, "data_2": "b"}, "data_1.content", "required"),
    (RERANK, {"query": "a", "documents": ["b"], "top_n": "all"}, "top_n", "integer"),
    (RERANK, {"query": {"content": [5]}, "documents": ["b"]}, "query.content.0", "an object"),
    (RERANK, {"query": "a", "documents": [{"text": "b"}]}, "documents.0.content", "required"),
    (Operation.TOKENIZE, {"prompt": 5}, "prompt", "string"),
    (Operation.TOKENIZE, {"messages": [{"content": "a"}]}, "messages.0.role", "required"),
    (Operation.DETOKENIZE, {"tokens": [1, "a"]}, "tokens.1", "integer"),
    (Operation.INPUT_TOKENS, items({"type": "function_call_output", "call_id": "c"}), "input.1.output", "required"),
]


def read(value: Any) -> None:
    """Read all that is validated late, as vLLM does."""
    if isinstance(value, BaseModel):
        for _, inner in value:
            read(inner)
    elif isinstance(value, dict):
        read(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for inner in value:
            read(inner)


def refusal(submit: Submit) -> dict[str, Any]:
    """The error that the engine answers."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - vLLM's own checks have errors of any kind
        read(serving.request_of(submit, True))
    error = caught.value
    if isinstance(error, ValidationError):
        reported = serving.validation_error(error, submit)
    else:
        reported = serving.error_response(error, submit)
    frame = serving.refusal(reported, submit)
    assert frame.status == 400
    return dict(json.loads(frame.body)["error"])


def test_a_schema_that_is_none_is_refused_at_its_path() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "response_format": wanted}
    with pytest.raises(BadRequest) as caught:
        serving.request_of(Submit(1, "r", Operation.CHAT, body), True)
    assert caught.value.param == "response_format.json_schema.schema"
    assert "an object" in caught.value.message


@pytest.mark.parametrize(("operation", "body", "param", "message"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_an_error_names_the_path_that_the_client_sent(
    operation: Operation, body: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(Submit(1, "r", operation, {"model": "m", **body}))
    assert (error["param"], error["message"].split(":")[0]) == (param, param), error
    assert message in error["message"]


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        (CHAT, {"messages": [USER, {"role": "robot", "content": [{"type": "text", "text": "a"}], "mood": "good"}]}),
        (CHAT, parts({"type": "video_url", "video_url": {"url": "a"}}, {"type": "text", "text": "a"})),
        (CHAT, {"messages": [{"role": "tool", "content": "1"}, {"role": "assistant", "content": None}]}),
        (RESPONSES, items({"role": "user", "content": "a", "id": "i", "status": "completed"})),
        (RESPONSES, turn({"type": "output_text", "text": "a"}, id="i")),
        (RESPONSES, items({"type": "reasoning", "summary": []}, {"type": "item_reference", "id": "i"}, {"id": "i"})),
        (EMBEDDING, {"messages": [[USER], [USER, USER]]}),
        (SCORE, {"queries": ["a"], "documents": ["b", {"content": [{"type": "text", "text": "a"}]}]}),
    ],
)
def test_what_vllm_takes_has_no_fault(operation: Operation, body: dict[str, Any]) -> None:
    body = as_vllm_reads(body) if operation is RESPONSES else body
    body = {"model": "m", **body}
    validated(operation, {**body})
    assert fault_of(operation, body) is None


@pytest.fixture(scope="module")
def reader() -> Iterator[tuple[asyncio.Runner, Reader]]:
    """vLLM's renderer of the model `tiny`, without an engine."""
    path = str(ensure_tiny_model())
    arguments = AsyncEngineArgs(model=path, served_model_name="m", dtype="float32", max_model_len=64)
    settings = ModelSettings(name="m", path=path, tool_parser="hermes")
    setup = RenderSetup(arguments.create_engine_config(), serving.frontend_arguments(arguments, settings), True)
    with asyncio.Runner() as runner:
        reader = Reader(setup)
        runner.run(reader.start())
        yield runner, reader


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
LONG = "river " * 400


@pytest.mark.parametrize(
    ("operation", "body", "param", "message"),
    [
        (CHAT, parts({"type": "photo", "text": "a"}, role="robot"), "messages.1.content.0.type", ""),
        (CHAT, parts({"type": "image_url"}), "messages.1.content.0.image_url", "required"),
        (
            CHAT,
            parts({"type": "text", "text": "a"}, {"type": "text", "text": 5}),
            "messages.1.content.1.text",
            "string",
        ),
        (CHAT, parts(IMAGE), "messages.1.content.0", ""),
        (CHAT, {"messages": [USER], "logprobs": 5, "top_logprobs": 1}, "logprobs", "boolean"),
        (
            CHAT,
            {
                "messages": [USER],
                "tools": [{"type": "function", "function": {"name": 5}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "tools.0.function.name",
            "string",
        ),
        (
            RESPONSES,
            items({"type": "reasoning", "summary": [{"type": "x", "text": "a"}]}),
            "input.1.summary.0.type",
            "",
        ),
        (RESPONSES, items({"type": "reasoning", "summary": [{"type": "summary_text"}]}), "input.1.summary.0.text", ""),
        (CHAT, parts("a"), "messages.1.content.0", "object"),
        (
            CHAT,
            parts({"type": "text", "text": "a"}, {"type": None, "text": "a"}),
            "messages.1.content.1.type",
            "type",
        ),
        (
            CHAT,
            {"messages": [USER, {"role": "robot", "content": "a", "reasoning": 5}]},
            "messages.1.reasoning",
            "string",
        ),
        (
            CHAT,
            {"messages": [USER, {"role": "robot", "content": "a", "reasoning_content": 5}]},
            "messages.1.reasoning_content",
            "string",
        ),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages", "maximum context length"),
        (CHAT, {"messages": [USER, {"role": "robot", "content": "a"}]}, "messages", "unknown role: robot"),
        (Operation.TOKENIZE, {"messages": [{"role": "robot", "content": "a"}]}, "messages", "unknown role: robot"),
        (TEXT, {"prompt": LONG}, "prompt", "maximum context length"),
        (TEXT, {"prompt": ["a", LONG]}, "prompt.1", "maximum context length"),
        (TEXT, {"prompt": [[5] * 99]}, "prompt.0", "maximum context length"),
        (RESPONSES, {"input": LONG}, "input", "maximum context length"),
        (
            RESPONSES,
            items(
                {
                    "type": "web_search_call",
                    "id": "w",
                    "status": "completed",
                    "action": {"type": "search", "query": "a"},
                }
            ),
            "input.1.type",
            "",
        ),
        (
            RESPONSES,
            items({"type": "reasoning", "summary": [], "encrypted_content": "a"}),
            "input.1.encrypted_content",
            "",
        ),
        (
            RESPONSES,
            items({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}),
            "input.1.content.0",
            "",
        ),
        (CHAT, {"messages": []}, "messages", "empty"),
        (CHAT, {"messages": [USER, {"role": "user", "content": ["a", "b"]}]}, "messages.1.content.0", "object"),
        (RESPONSES, {"input": []}, "input", "empty"),
        (
            RESPONSES,
            items({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file", "file_id": 5}]}),
            "input.1.output.0.file_id",
            "string",
        ),
    ],
)
def test_an_error_of_rendering_names_the_path_too(
    reader: tuple[asyncio.Runner, Reader], operation: Operation, body: dict[str, Any], param: str, message: str
) -> None:
    runner, rendering = reader
    submit = Submit(1, "r", operation, {"model": "m", **body})
    reported = runner.run(rendering.read(submit))
    assert isinstance(reported, ErrorResponse), reported
    error = json.loads(serving.refusal(reported, submit).body)["error"]
    assert error["param"] == param, error
    assert message in error["message"]
