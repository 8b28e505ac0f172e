"""OpenAI request bodies as the simulated engine reads them. Pure.

Fields that determine the answer's length are checked and applied. Seed and prompt determine its text, so sampling
parameters change nothing that could be told apart (`QUIET`). Any other field, such as tools, a schema or logprobs, is
ignored, and the answer's `warnings` name it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from serve_app.core.score_inputs import score_inputs
from serve_app.engine.simulated.text import SimulatedChoice, count_tokens, first_stop, text_key
from serve_app.errors import BadRequest
from serve_app.types import Operation

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_CHOICES = 128  # OpenAI's bound on n; the router's own is lower

# Fields of a generation that are no warning: what is applied, and what leaves no sign in a text that is noise anyway.
_APPLIED = "model messages prompt n stream stream_options stop max_tokens max_completion_tokens ignore_eos min_tokens"
_SIGNLESS = (
    "user metadata temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty seed"
    " stream_interval skip_special_tokens spaces_between_special_tokens add_special_tokens include_reasoning"
    " parallel_tool_calls"
)
QUIET = frozenset(f"{_APPLIED} {_SIGNLESS}".split())
ASKS_NOTHING: tuple[Any, ...] = ("", "none", "auto", [], {}, {"type": "text"})  # beside null and false

Prompts = list[tuple[str, int]]  # texts with their lengths in tokens


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked chat or completion request. `prompt_tokens` counts each prompt once, as vLLM does. `ignored`: fields
    that ask for what the answer has not."""

    choices: tuple[SimulatedChoice, ...]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Prompt and output tokens of each choice."""
        return [(choice.prompt_tokens, choice.max_tokens) for choice in self.choices]

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's usage object, once every choice has ended."""
        output = sum(choice.max_tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
        }


def parse_generation(operation: Operation, body: dict[str, Any], *, seed: int, max_model_len: int) -> Generation:
    """Read a chat or completion body.

    Raises:
        BadRequest: a field is missing or wrong, or a prompt leaves no tokens for output; `param` names the field.
    """
    if operation is Operation.RESPONSES:
        body = chat_of_response(body)
    chat = operation.has_chat_body or operation is Operation.RESPONSES
    prompts = [_chat_prompt(body)] if chat else _prompts(body, "prompt")
    n = _integer(body, "n") or 1
    if n * len(prompts) > MAX_CHOICES:
        raise BadRequest(f"{n * len(prompts)} choices, at most {MAX_CHOICES} are possible", param="n")
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not (isinstance(options, dict) and stream):
        raise BadRequest("stream_options: an object is wanted, and only beside stream", param="stream_options")
    include_usage = _flag(options or {}, "include_usage")
    stops = _stops(body)
    wanted = (_integer(body, "max_completion_tokens") if chat else None) or _integer(body, "max_tokens")
    choices: list[SimulatedChoice] = []
    _check_lengths(prompts, max_model_len - 1, "messages" if chat else "prompt", body)
    for text, tokens in prompts:
        room = max_model_len - tokens
        max_tokens = min(room, wanted or (room if chat else DEFAULT_COMPLETION_TOKENS))
        for number in range(n):
            key = text_key(seed, number, text)
            stop = first_stop(key, max_tokens, stops) if stops else None
            length, cut = stop if stop else (max_tokens, None)
            choices.append(SimulatedChoice(len(choices), key, tokens, length, cut))
    ignored = ignored_fields(body)
    prompt_tokens = sum(tokens for _, tokens in prompts)
    return Generation(tuple(choices), prompt_tokens, stream, include_usage, ignored, tuple(stops))


def ignored_fields(body: dict[str, Any]) -> tuple[str, ...]:
    """The fields that ask for something and have no effect, by name."""
    asking = {name for name, value in body.items() if value is not None and value is not False}
    return tuple(sorted(name for name in asking - QUIET if body[name] not in ASKS_NOTHING))


def parse_embedding(body: dict[str, Any], *, max_model_len: int) -> tuple[Prompts, bool]:
    """The texts of an embeddings body, and whether base64 is wanted. Raises BadRequest as `parse_generation` does."""
    inputs = _prompts(body, "input")
    _check_lengths(inputs, max_model_len, "input", body)
    packing = body.get("encoding_format") or "float"
    if packing not in ("float", "base64"):
        raise BadRequest("encoding_format: float or base64 is wanted", param="encoding_format")
    if body.get("dimensions") is not None:
        raise BadRequest("dimensions: this model has one size", param="dimensions")
    return inputs, packing == "base64"


@dataclass(frozen=True, slots=True)
class Scoring:
    """A checked score or rerank request. `top_n`: of a rerank, the number of documents in the answer; 0: all."""

    queries: Prompts
    documents: Prompts
    top_n: int

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in [*self.queries, *self.documents])

    @property
    def pairs(self) -> list[tuple[str, str]]:
        queries = self.queries * (len(self.documents) if len(self.queries) == 1 else 1)
        return [(query, document) for (query, _), (document, _) in zip(queries, self.documents, strict=True)]


def parse_scoring(operation: Operation, body: dict[str, Any], *, max_model_len: int) -> Scoring:
    """Read a score or rerank body of texts. Raises BadRequest as `parse_generation` does."""
    found = score_inputs(operation, body)
    texts: list[Prompts] = []
    for field, entries in ((found.query_field, found.queries), (found.document_field, found.documents)):
        for number, entry in enumerate(entries):
            if not isinstance(entry, str):
                raise _wrong(_path(field, number, body), "a text is wanted")
        texts.append([(entry, count_tokens(entry)) for entry in entries])
        _check_lengths(texts[-1], max_model_len, field, body)
    top_n = body.get("top_n", 0)
    if operation is Operation.RERANK and (type(top_n) is not int or top_n < 0):
        raise BadRequest("top_n: a whole number of at least 0 is wanted", param="top_n")
    return Scoring(texts[0], texts[1], top_n)


def chat_of_response(body: dict[str, Any]) -> dict[str, Any]:
    """The chat body that says what this body of a response says."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [_message(item) for item in items] if isinstance(items, list) else items
    if body.get("instructions") is not None and isinstance(messages, list):
        messages = [{"role": "system", "content": body["instructions"]}, *messages]
    chat = {"messages": messages, "stream": body.get("stream"), "max_tokens": body.get("max_output_tokens")}
    return {name: value for name, value in chat.items() if value is not None}


def _message(item: Any) -> Any:
    """An item as a message; what is none, such as the result of a tool, as its JSON."""
    if not isinstance(item, dict) or "role" in item:
        return item
    return {"role": str(item.get("type")), "content": json.dumps(item, sort_keys=True)}


def parse_tokenize(body: dict[str, Any]) -> str:
    """The text of a /tokenize body: its `prompt`, or its `messages` as a prompt."""
    if "messages" in body:
        return _chat_prompt(body)[0]
    if not isinstance(body.get("prompt"), str):
        raise BadRequest("prompt: a string is wanted", param="prompt")
    return str(body["prompt"])


def parse_detokenize(body: dict[str, Any]) -> list[int]:
    """The token ids of a /detokenize body."""
    tokens = body.get("tokens")
    if not _is_ids(tokens):
        raise BadRequest("tokens: a list of token ids is wanted", param="tokens")
    return list(tokens or [])


def _chat_prompt(body: dict[str, Any]) -> tuple[str, int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: a list of at least one message is wanted", param="messages")
    lines = [json.dumps(body["tools"], sort_keys=True)] if body.get("tools") else []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _wrong(f"messages.{index}", "an object is wanted")
        if not isinstance(message.get("role"), str):
            raise _wrong(f"messages.{index}.role", "a string is wanted")
        calls = json.dumps(message["tool_calls"], sort_keys=True) if message.get("tool_calls") else ""
        lines.append(f"{message['role']}: {_content(message.get('content'), index)}{calls}")
    text = "\n".join(lines)
    return text, count_tokens(text)


def _content(content: Any, index: int) -> str:
    path = f"messages.{index}.content"
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _wrong(path, "a string or a list of text parts is wanted")
    for number, part in enumerate(content):
        if not isinstance(part, dict):
            raise _wrong(f"{path}.{number}", "an object is wanted")
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{path}.{number}.text", "a string is wanted")
    return "".join(part["text"] for part in content)


def _prompts(body: dict[str, Any], param: str) -> Prompts:
    """A string, a list of strings, token ids or lists of token ids, as texts with their lengths in tokens."""
    given = body.get(param)
    if isinstance(given, str) or (given and _is_ids(given)):
        given = [given]
    if isinstance(given, list) and given:
        if all(isinstance(item, str) for item in given):
            return [(text, count_tokens(text)) for text in given]
        if all(_is_ids(item) for item in given):
            return [(json.dumps(item), len(item)) for item in given]
        is_entry = _is_ids if _is_ids(given[0]) else lambda item: isinstance(item, str)
        wrong = next(number for number, item in enumerate(given) if not is_entry(item))
        raise _wrong(f"{param}.{wrong}", "a string or token ids are wanted, as in the entries before it")
    raise _wrong(param, "a string, token ids, or a list of either is wanted")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_lengths(prompts: Prompts, limit: int, field: str, body: dict[str, Any]) -> None:
    for number, (_, tokens) in enumerate(prompts):
        path = _path(field, number, body)
        if not tokens:
            raise _wrong(path, "the prompt is empty")
        if tokens > limit:
            message = f"{path}: {tokens} tokens, this model's context takes a prompt of at most {limit}"
            raise BadRequest(message, param=path, code="context_length_exceeded")


def _path(field: str, number: int, body: dict[str, Any]) -> str:
    """The path of a prompt; of a field that has one, the field."""
    has_several = isinstance(body.get(field), list) and field != "messages" and not _is_ids(body[field])
    return f"{field}.{number}" if has_several else field


def _wrong(path: str, message: str) -> BadRequest:
    return BadRequest(f"{path}: {message}", param=path)


def _integer(body: dict[str, Any], param: str) -> int | None:
    value = body.get(param)
    if value is not None and (type(value) is not int or value < 1):
        raise BadRequest(f"{param}: a whole number of at least 1 is wanted", param=param)
    return value


def _flag(body: dict[str, Any], param: str) -> bool:
    value = body.get(param)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{param}: true or false is wanted", param=param)
    return bool(value)


def _stops(body: dict[str, Any]) -> list[str]:
    given = body.get("stop")
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequest("stop: a string or a list of strings is wanted, none of them empty", param="stop")
    return stops
