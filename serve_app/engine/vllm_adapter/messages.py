"""Answers of a chat as Anthropic's clients read them: vLLM's own conversion of them, whole and streamed.

The request is a chat already (`core.anthropic`); what only the engine knows of the model is put in here.

Invariant: an error in vLLM's stream leaves here as vLLM wrote it, and nothing after it, so that it is handled as one of
any stream; and an answer that was cut in the arguments of a call has what there is of them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

import msgspec
import pydantic_core
from pydantic import BaseModel
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from serve_app.transport import Submit

# How vLLM's streams say that the request failed: in place of the first event when nothing of the answer came before.
ERROR_EVENT = 'data: {"error":'
CONVERSION_ERROR = "event: error"  # how its conversion does
NO_EFFORT = "none"
_CHAT_ID = "chatcmpl-"
_MESSAGE_ID = "msg_"


async def as_model_takes(serving: Any, submit: Submit) -> Submit:
    """The request as this model's template takes it. `serving`: vLLM's object.

    A template that wants one system message, at the beginning, gets all of them there. Thinking is switched off by the
    least effort that the template knows.
    """
    body = submit.body
    messages = body["messages"]
    if serving._merge_inline_system and any(one["role"] == "system" for one in messages[1:]):
        system = "".join(one["content"] for one in messages if one["role"] == "system")
        others = [one for one in messages if one["role"] != "system"]
        body = {**body, "messages": [{"role": "system", "content": system}, *others]}
    if body.get("reasoning_effort") == NO_EFFORT:
        body = {**body, "reasoning_effort": await serving._get_disabled_thinking_effort()}
    return submit if body is submit.body else msgspec.structs.replace(submit, body=body)


def anthropic_answer(serving: Any, answered: Any) -> BaseModel | bytes | AsyncGenerator[str, None]:
    """The answer of vLLM's chat in Anthropic's form; vLLM's error. `serving`: vLLM's object."""
    if isinstance(answered, ErrorResponse):
        return answered
    if isinstance(answered, BaseModel):
        return _whole(serving, answered)
    return _events(serving, answered)


def _whole(serving: Any, chat: Any) -> bytes:
    for call in chat.choices[0].message.tool_calls or ():
        call.function.arguments = _object_in(call.function.arguments)
    message = serving.messages_full_converter(chat)
    message.id = _MESSAGE_ID + message.id.removeprefix(_CHAT_ID)
    body = message.model_dump(exclude_none=True)
    body |= {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
    return msgspec.json.encode(body)


def _object_in(arguments: str) -> str:
    """The arguments of a call, which are an object; of those that were cut, what there is of it."""
    try:
        found = pydantic_core.from_json(arguments, allow_partial=True)
    except ValueError:
        found = None
    return json.dumps(found if isinstance(found, dict) else {})


async def _events(serving: Any, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    failure = ""

    async def until_error() -> AsyncGenerator[str, None]:
        nonlocal failure
        async for chunk in chunks:
            if chunk.startswith(ERROR_EVENT):
                failure = chunk
                return
            yield chunk

    read = until_error()
    events = serving.message_stream_converter(read)
    has_begun = False
    try:
        async for event in events:
            if failure:
                break
            if event.startswith(CONVERSION_ERROR):
                failure = _conversion_failed()
                break
            if not has_begun:
                event = event.replace(f'"id":"{_CHAT_ID}', f'"id":"{_MESSAGE_ID}', 1)
                has_begun = True
            yield event
        if failure:
            yield failure
    finally:
        await events.aclose()
        await read.aclose()
        await chunks.aclose()


def _conversion_failed() -> str:
    """As vLLM's chat would say it; vLLM has logged the reason."""
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    error = create_error_response("the answer cannot be converted", "InternalServerError", status)
    return f"data: {error.model_dump_json()}\n\n"
