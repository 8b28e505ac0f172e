"""The chat completion that a Messages request asks for.

Decided here, as vLLM 0.32.0 has it (a test compares the two): the system prompt is the first message; the results of
tools are messages of their own before the rest of their turn; thinking of earlier turns goes back to the template as
`reasoning`; `cache_control`, `metadata`, `signature` and unknown fields have no effect. Not as there: a tool that only
Anthropic can run, a block or a source of a type that no engine here reads, and a field that another service would have
to act on are refused by name; a last message of the model's is continued, as at Anthropic, and so is the text of its.

Invariant: the body that was sent is not changed, and its first fault is refused with the field's path in it. Values of
sampling parameters are the chat's to check.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from serve_app.errors import BadRequest
from serve_app.types import Operation

# What keeps its name. The second part is vLLM's and ours, beyond Anthropic's.
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "service_tier")
_MORE = ("priority", "chat_template_kwargs", "seed", "min_p", "repetition_penalty", "min_tokens", "ignore_eos")
_READ = ("messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "thinking", "output_config")
_REFUSED = {
    "mcp_servers": "no server of tools is called from here, give its tools as `tools` and run them",
    "container": "no code is run here",
}
READ_FIELDS = frozenset((*_SAME, *_MORE, *_READ, *_REFUSED, "metadata"))

DEFAULT_TIER = "standard_only"  # Anthropic's word for a request without priority: the class of the key
MIN_THINKING_TOKENS = 1024  # Anthropic's bound, and vLLM's
EFFORTS = ("low", "medium", "high", "xhigh", "max")
NO_EFFORT = "none"  # vLLM's `reasoning_effort` of a request without thinking
# The first block of Claude Code's system prompt: it differs in each request, so no prompt would have a cached prefix.
_BILLING_HEADER = "x-anthropic-billing-header"
# Of a tool that a search of the client's has found: it is among `tools`, where `defer_loading` has no effect.
FOUND_TOOL = "The tool {} can be called now."
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(operation: Operation, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the chat completion. O(values of the body).

    Args:
        operation: `MESSAGES`, or `MESSAGE_TOKENS`, which needs no `max_tokens`.

    Raises:
        BadRequest: `param` is the path of what is wrong.
    """
    for name, why in _REFUSED.items():
        if body.get(name):
            raise BadRequest(f"`{name}` is not supported: {why}", param=name)
    chat = {name: body[name] for name in (*_SAME, *_MORE) if body.get(name) is not None}
    if chat.get("service_tier") == DEFAULT_TIER:
        del chat["service_tier"]
    chat["messages"] = list(_messages(body))
    if _is_begun(chat["messages"][-1]):
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if operation is Operation.MESSAGES:
        chat["max_tokens"] = _max_tokens(body)
        _set_stream(chat)
        if body.get("stop_sequences") is not None:
            chat["stop"] = _texts(body["stop_sequences"], "stop_sequences")
    _set_tools(chat, body)
    _set_output(chat, body.get("output_config"))
    _set_thinking(chat, body.get("thinking"))
    return chat


def _is_begun(last: Mapping[str, Any]) -> bool:
    """Whether the last message is the beginning of the answer, which goes on behind it."""
    has_more = "tool_calls" in last or "reasoning" in last
    return last["role"] == "assistant" and not has_more and bool(last.get("content"))


def _max_tokens(body: Mapping[str, Any]) -> int:
    value = body.get("max_tokens")
    if value is None:
        _missing("max_tokens")
    if type(value) is not int or value < 1:
        _wrong("max_tokens", "a whole number of at least 1")
    return int(value)


def _set_stream(chat: dict[str, Any]) -> None:
    stream = chat.get("stream")
    if stream is not None and type(stream) is not bool:
        _wrong("stream", "true or false")
    if stream:  # an answer begins with the tokens of its prompt, and ends with those of its text
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}


# --- messages


def _messages(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    system = _system_text(body.get("system"), "system")
    if system:
        yield {"role": "system", "content": system}
    messages = body.get("messages")
    if messages is None:
        _missing("messages")
    if type(messages) is not list or not messages:
        _wrong("messages", "a list of at least one message")
    for number, message in enumerate(messages):
        path = f"messages.{number}"
        if type(message) is not dict:
            _wrong(path, "an object")
        role = message.get("role")
        if message.get("content") is None:
            _missing(f"{path}.content")
        if role == "system":
            text = _system_text(message["content"], f"{path}.content")
            if text:
                yield {"role": "system", "content": text}
        elif role == "user":
            yield from _user(message["content"], f"{path}.content")
        elif role == "assistant":
            yield _assistant(message["content"], f"{path}.content")
        else:
            _wrong(f"{path}.role", "user or assistant")


def _system_text(content: Any, path: str) -> str:
    if content is None or type(content) is str:
        texts = [content or ""]
    else:
        texts = [_text_of(block, at) for block, at in _blocks(content, path, "text")]
    return "".join(text for text in texts if not text.startswith(_BILLING_HEADER))


def _user(content: Any, path: str) -> Iterator[dict[str, Any]]:
    """The results of tools in a turn, each a message of its own, then the rest of it."""
    if type(content) is str:
        yield {"role": "user", "content": content}
        return
    parts = list[dict[str, Any]]()
    for block, at in _blocks(content, path, "text", "image", "tool_result"):
        if block["type"] == "text":
            parts += _text_part(block, at)
        elif block["type"] == "image":
            parts.append(_image_part(block, at))
        else:
            yield from _tool_result(block, at)
    if parts:
        yield {"role": "user", "content": _joined(parts)}


def _assistant(content: Any, path: str) -> dict[str, Any]:
    if type(content) is str:
        return {"role": "assistant", "content": content}
    parts = list[dict[str, Any]]()
    calls = list[dict[str, Any]]()
    thoughts = list[str]()
    for block, at in _blocks(content, path, "text", "thinking", "redacted_thinking", "tool_use"):
        match block["type"]:
            case "text":
                parts += _text_part(block, at)
            case "thinking":
                thoughts.append(_field(block, "thinking", str, "a string", at))
            case "tool_use":
                calls.append(_call(block, at))
    message: dict[str, Any] = {"role": "assistant"}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts or not (calls or thoughts):
        message["content"] = _joined(parts) if parts else ""
    return message


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    arguments = json.dumps(_field(block, "input", dict, "an object", path))
    name = _field(block, "name", str, "a string", path)
    call_id = _field(block, "id", str, "a string", path)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(block: Mapping[str, Any], path: str) -> Iterator[dict[str, Any]]:
    """The message of a tool's result, and its images as a turn of the user: no template takes them in the former."""
    call_id = _field(block, "tool_use_id", str, "a string", path)
    content = block.get("content")
    texts = [content] if type(content) is str else []
    images = list[dict[str, Any]]()
    if content is not None and type(content) is not str:
        for part, at in _blocks(content, f"{path}.content", "text", "image", "tool_reference"):
            if part["type"] == "text":
                texts.append(_text_of(part, at))
            elif part["type"] == "tool_reference":
                texts.append(FOUND_TOOL.format(_field(part, "tool_name", str, "a string", at)))
            else:
                images.append(_image_part(part, at))
    yield {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}
    if images:
        yield {"role": "user", "content": images}


def _blocks(content: Any, path: str, *kinds: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The blocks of a content with their paths, all of these types."""
    if type(content) is not list:
        _wrong(path, "a string or a list of blocks")
    for number, block in enumerate(content):
        at = f"{path}.{number}"
        if type(block) is not dict:
            _wrong(at, "an object")
        if block.get("type") is None:
            _missing(f"{at}.type")
        if block["type"] not in kinds:
            _wrong(f"{at}.type", f"one of {', '.join(kinds)}")
        yield block, at


def _text_of(block: Mapping[str, Any], path: str) -> str:
    return str(_field(block, "text", str, "a string", path))


def _text_part(block: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    text = _text_of(block, path)
    return [{"type": "text", "text": text}] if text else []


def _image_part(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    source = _field(block, "source", dict, "an object", path)
    path = f"{path}.source"
    match source.get("type"):
        case "url":
            url = _field(source, "url", str, "a string", path)
        case "base64":
            media_type = _field(source, "media_type", str, "a string", path)
            url = f"data:{media_type};base64,{_field(source, 'data', str, 'a string', path)}"
        case _:
            _wrong(f"{path}.type", "base64 or url")
    return {"type": "image_url", "image_url": {"url": url}}


def _joined(parts: list[dict[str, Any]]) -> Any:
    """The content of a message; one text by itself: some templates take nothing else."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


# --- tools, form of the answer, thinking


def _set_tools(chat: dict[str, Any], body: Mapping[str, Any]) -> None:
    tools = body.get("tools") or []
    if type(tools) is not list:
        _wrong("tools", "a list of tools")
    choice = {} if body.get("tool_choice") is None else body["tool_choice"]
    kind = _choice_kind(choice)
    if tools:
        chat["tools"] = [_tool(tool, f"tools.{number}") for number, tool in enumerate(tools)]
    elif kind not in ("", "none"):
        raise BadRequest("`tool_choice` needs `tools`", param="tool_choice")
    if not kind or not tools:
        return
    chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    if kind == "tool":
        name = _field(choice, "name", str, "a string", "tool_choice")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        chat["tool_choice"] = _CHOICES[kind]


def _choice_kind(choice: Any) -> str:
    """The type of a `tool_choice`; empty: there is none."""
    if type(choice) is not dict:
        _wrong("tool_choice", "an object")
    if not choice:
        return ""
    kind = choice.get("type")
    if type(kind) is not str or kind not in ("tool", *_CHOICES):
        _wrong("tool_choice.type", "one of auto, any, tool, none")
    return kind


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if type(tool) is not dict:
        _wrong(path, "an object")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        reason = "only tools with an `input_schema`, which the client runs, are supported"
        raise BadRequest(f"`{path}.type`: {reason}", param=f"{path}.type")
    schema = _field(tool, "input_schema", dict, "an object", path)
    function = {"name": _field(tool, "name", str, "a string", path), "parameters": {**schema}}
    function["parameters"].setdefault("type", "object")
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _set_output(chat: dict[str, Any], config: Any) -> None:
    if config is None:
        return
    if type(config) is not dict:
        _wrong("output_config", "an object")
    effort = config.get("effort")
    if effort is not None:
        if effort not in EFFORTS:
            _wrong("output_config.effort", f"one of {', '.join(EFFORTS)}")
        chat["reasoning_effort"] = effort
    form = config.get("format")
    if form is None:
        return
    if type(form) is not dict:
        _wrong("output_config.format", "an object")
    if form.get("type") != "json_schema":
        _wrong("output_config.format.type", "json_schema")
    schema = _field(form, "schema", dict, "an object", "output_config.format")
    chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}


def _set_thinking(chat: dict[str, Any], thinking: Any) -> None:
    if thinking is None:
        return
    if type(thinking) is not dict:
        _wrong("thinking", "an object")
    match thinking.get("type"):
        case "disabled":
            chat["reasoning_effort"] = NO_EFFORT
        case "enabled":
            tokens = _field(thinking, "budget_tokens", int, "a whole number", "thinking")
            path = "thinking.budget_tokens"
            if tokens < MIN_THINKING_TOKENS:
                _wrong(path, f"at least {MIN_THINKING_TOKENS}")
            if tokens >= chat.get("max_tokens", tokens + 1):
                _wrong(path, "below `max_tokens`")
            chat["thinking_token_budget"] = tokens
        case "adaptive":
            pass  # the model decides
        case _:
            _wrong("thinking.type", "one of enabled, disabled, adaptive")


# --- faults


def _field(holder: Mapping[str, Any], name: str, kind: type, words: str, path: str) -> Any:
    """A required field of an object."""
    value = holder.get(name)
    if value is None:
        _missing(f"{path}.{name}")
    if type(value) is not kind:
        _wrong(f"{path}.{name}", words)
    return value


def _texts(value: Any, path: str) -> list[str]:
    if type(value) is not list:
        _wrong(path, "a list of strings")
    for number, text in enumerate(value):
        if type(text) is not str or not text:
            _wrong(f"{path}.{number}", "a string that is not empty")
    return list(value)


def _missing(path: str) -> NoReturn:
    raise BadRequest(f"`{path}` is missing", param=path)


def _wrong(path: str, words: str) -> NoReturn:
    raise BadRequest(f"`{path}` must be {words}", param=path)
