"""A request that was validated and rendered in another process, and vLLM's renderer that takes it from there; and the
name of what it refuses: the words of a chat template's own refusal name no field."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser.utils import count_history_tool_calls
from vllm.renderers.online_renderer import OnlineRenderer

from serve_app.engine.client_names import MESSAGES
from serve_app.engine.vllm_adapter.wrapped import wrap


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
        wrap(renderer, name, _take)


async def _take(render: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    found = rendered_of_request.get()
    if found is None:
        return await render(*args, **kwargs)
    rendered_of_request.set(None)
    return found.result


def name_what_is_refused(renderer: Any) -> None:
    """Make refusals of messages by this renderer of vLLM, or by the model's chat template, name the messages where they
    name nothing."""

    def rendered(render: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _messages_named():
            return render(*args, **kwargs)

    async def rendered_async(render: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        with _messages_named():
            return await render(*args, **kwargs)

    wrap(renderer, "render_messages", rendered)
    wrap(renderer, "render_messages_async", rendered_async)


@contextlib.contextmanager
def _messages_named() -> Iterator[None]:
    try:
        yield
    except VLLMValidationError as error:
        error.parameter = error.parameter or MESSAGES
        raise
    except ValidationError:
        raise  # of an entry that is read only now, and has its path
    except ValueError as error:  # a renderer that has no template
        raise VLLMValidationError(str(error), parameter=MESSAGES) from error


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
