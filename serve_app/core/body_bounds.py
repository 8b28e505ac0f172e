"""Bounds the prompt of a request by what its model could hold, before anything validates, renders or tokenizes it.

That work costs microseconds a byte and up to a tenth of a millisecond an entry, of an event loop that all tenants
share, and vLLM compares the prompt with the model's length only after it. Here each value is visited once. What passes
and is still large (`is_large`) is read in a process of its own.

Invariant: a prompt that fits the model passes. A token may have `MAX_TOKEN_BYTES` bytes; entries and text may become no
token at all, up to `SPARE_ENTRIES` and `SPARE_BYTES`. Text that the engine truncates fits, however long it is. Each
prompt of a list is bounded by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.errors import BadRequest
from serve_app.types import Operation

MAX_TOKEN_BYTES = 128  # the longest tokens of Llama 3's and GPT-4o's vocabularies: 128 spaces
SPARE_BYTES = 2**16  # of text that a template strips or leaves out
ENTRIES_PER_TOKEN = 2  # a message of one part, which is one token
SPARE_ENTRIES = 4096  # that a template leaves out, or whose texts merge into one token
LARGE_OBJECTS = 512  # 15 ms of validation and rendering by vLLM; an item of Responses counts twice
LARGE_TEXT_CHARS = 2**16  # 50 ms of a tokenizer, which takes one text after the other
NUMBERS_PER_OBJECT = 256  # so many token ids are copied in the time of one message
TOO_LONG = "context_length_exceeded"  # OpenAI's code, which clients know how to handle

# Fields that are rendered or tokenized, as one prompt; of a list in the second ones, each entry is a prompt.
_PROMPT_FIELDS = ("messages", "input", "prompt", "instructions", "suffix", "tools", "chat_template_kwargs", "tokens")
_SCORE_FIELDS = ("queries", "query", "documents", "items", "text_1", "text_2", "data_1", "data_2", "instruction")
_TRUNCATE_FIELDS = ("truncate_prompt_tokens", "max_tokens_per_query", "max_tokens_per_doc")
# Media, and what only OpenAI itself can read.
_MEDIA = frozenset(
    ("image_url", "video_url", "audio_url", "input_audio", "image_embeds", "audio_embeds", "video_embeds", "file_data")
)
_NOT_TEXT = _MEDIA | {"encrypted_content"}


@dataclass(slots=True)
class _PromptSize:
    """Of one prompt: entries of lists that are texts or objects; numbers in lists; bytes of text, names included."""

    entries: int = 0
    numbers: int = 0
    text_bytes: int = 0


def check_prompt(operation: Operation, body: Mapping[str, Any], max_model_len: int) -> None:
    """Refuse a prompt that is longer than any that fits the model.

    Args:
        max_model_len: tokens of the model's longest sequence.

    Raises:
        BadRequest: `param` is the field with too many messages, items, parts, token ids or bytes.
    """
    most_entries = ENTRIES_PER_TOKEN * max_model_len + SPARE_ENTRIES
    most_numbers = max_model_len + SPARE_ENTRIES
    most_bytes = MAX_TOKEN_BYTES * max_model_len + SPARE_BYTES
    truncates = body.get("truncation") not in (None, "disabled") or any(
        body.get(name) is not None for name in _TRUNCATE_FIELDS
    )
    for field, prompt in _prompts(operation, body):
        size = _size(prompt)
        if size.entries > most_entries:
            raise _too_long(field, f"{size.entries} messages, parts or other entries", most_entries, max_model_len)
        if size.numbers > most_numbers and not truncates:
            raise _too_long(field, f"{size.numbers} token ids", most_numbers, max_model_len)
        if size.text_bytes > most_bytes and not truncates:
            raise _too_long(field, f"{size.text_bytes} bytes of text", most_bytes, max_model_len)


def is_large(operation: Operation, body: Mapping[str, Any]) -> bool:
    """Whether reading this body would stop an event loop, or hold up the tokenizer, for longer than others notice. It
    looks at no more values than it takes to know that."""
    left, chars = LARGE_OBJECTS * NUMBERS_PER_OBJECT, LARGE_TEXT_CHARS
    each = NUMBERS_PER_OBJECT * (2 if operation in (Operation.RESPONSES, Operation.INPUT_TOKENS) else 1)
    levels: list[Iterator[Any]] = [iter(body.values())]
    while levels:
        for value in levels[-1]:
            if type(value) is str:
                chars -= len(value)
            elif type(value) is dict or type(value) is list:
                left -= each
                levels.append(iter(value.values() if type(value) is dict else value))
                break
            else:
                left -= 1
            if left < 0 or chars < 0:
                return True
        else:
            levels.pop()
        if left < 0:
            return True
    return False


def has_media(body: Any) -> bool:
    """Whether a body has an image, audio or video in it."""
    nodes = [body]
    for node in nodes:  # grows meanwhile
        if type(node) is dict and not _MEDIA.isdisjoint(node):
            return True
        nodes += [child for child in (node.values() if type(node) is dict else node) if type(child) in (dict, list)]
    return False


def _too_long(field: str, found: str, most: int, max_model_len: int) -> BadRequest:
    return BadRequest(
        f"This model's maximum context length is {max_model_len} tokens. However, `{field}` has {found}, and no prompt"
        f" of that length has more than {most}.",
        param=field,
        code=TOO_LONG,
    )


def _prompts(operation: Operation, body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each prompt in a body, with its field."""
    for field in (*_PROMPT_FIELDS, *_SCORE_FIELDS):
        value = body.get(field)
        if type(value) is not list:
            if value is not None:
                yield field, value
        elif _holds_prompts(operation, field, value):
            for prompt in value:
                yield field, prompt
        else:
            yield field, value


def _holds_prompts(operation: Operation, field: str, value: list[Any]) -> bool:
    """Whether a list is one of prompts; their number has a bound of its own (`http.request_size`)."""
    match operation:
        case Operation.COMPLETION:
            return field == "prompt" and any(type(one) in (str, list) for one in value[:1])
        case Operation.EMBEDDING:
            return field in ("input", "messages") and any(type(one) in (str, list) for one in value[:1])
        case Operation.SCORE | Operation.RERANK:
            return field in _SCORE_FIELDS
    return False


def _size(prompt: Any) -> _PromptSize:
    size = _PromptSize()
    nodes = [prompt]
    while nodes:
        node = nodes.pop()
        if type(node) is str:
            size.text_bytes += _text_bytes(node)
        elif type(node) is dict:
            size.text_bytes += sum(map(len, node))
            nodes += [child for name, child in node.items() if name not in _NOT_TEXT]
        elif type(node) is list:
            inner = [child for child in node if type(child) in (str, dict, list)]
            size.entries += len(inner)
            size.numbers += len(node) - len(inner)
            nodes += inner
    return size


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
