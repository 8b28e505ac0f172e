"""A request that was validated and rendered in another process, and vLLM's renderer that takes it from there."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser.utils import count_history_tool_calls
from vllm.renderers.online_renderer import OnlineRenderer


@dataclass(frozen=True, slots=True)
class Rendered:
    """The request as vLLM's model of it, and what its renderer has made of it."""

    request: Any
    result: Any


# Taken by the first call of the renderer in the request's task.
rendered_of_request: ContextVar[Rendered | None] = ContextVar("rendered", default=None)


def take_rendered(renderer: OnlineRenderer) -> None:
    """Make this renderer return what is rendered already."""
    for name in ("render_chat", "render_responses", "render_completion"):
        setattr(renderer, name, _taking(getattr(renderer, name)))


def _taking(render: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(render)
    async def take(*args: Any, **kwargs: Any) -> Any:
        found = rendered_of_request.get()
        if found is None:
            return await render(*args, **kwargs)
        rendered_of_request.set(None)
        return found.result

    return take


def without_history(rendered: Rendered) -> Rendered:
    """The same without the messages that nothing reads any more: 100,000 of them are slow to unpickle, too. What vLLM
    still reads is kept: the last message, and how many tool calls there were, from which it counts on."""
    request: Any = rendered.request
    if isinstance(request, ChatCompletionRequest):
        earlier: Any = {"role": "assistant", "tool_calls": [{}] * count_history_tool_calls(request)}
        request.messages = [earlier, *map(_plain, request.messages[-1:])]
        conversation, inputs = rendered.result
        return replace(rendered, result=(conversation[-1:], inputs))
    if isinstance(request, ResponsesRequest) and not isinstance(request.input, str):
        calls: list[Any] = [{"type": "function_call"}] * count_history_tool_calls(request)
        request.input = calls
        if not request.enable_response_messages:
            return replace(rendered, result=replace(rendered.result, messages=[]))
    return rendered


def _plain(message: Any) -> Any:
    return {"role": message["role"]} if isinstance(message, dict) else message
