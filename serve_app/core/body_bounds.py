"""Bounds the prompt of a request by what its model could hold, before anything validates, renders or tokenizes it.

That work costs microseconds a byte and up to a tenth of a millisecond an entry, of an event loop that all tenants
share, and vLLM compares the prompt with the model's length only after it. Here each value is visited once. What passes
and is still large (`is_large`) is read in a process of its own.

Invariant: a prompt that fits the model passes. A token may have `MAX_TOKEN_BYTES` bytes; entries and text may become no
token at all, up to `SPARE_ENTRIES` and `SPARE_BYTES`. Text that its operation truncates fits, however long it is. Each
prompt of a list is bounded by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve_app.errors import BadRequest
from serve_app.types import Operation

MAX_TOKEN_BYTES = 128  # the longest tokens of Llama 3's and GPT-4o's vocabularies: 128 spaces
SPARE_BYTES = 2**16  # of text that a template strips or leaves out
ENTRIES_PER_TOKEN = 2  # a message of one part, which is one token
SPARE_ENTRIES = 4096  # that a template leaves out, or whose texts merge into one token
LARGE_OBJECTS = 512  # 15 ms of validation and rendering by vLLM; an item of Responses counts twice
LARGE_TEXT_CHARS = 2**16  # 50 ms of a tokenizer, which takes one text after the other
NUMBERS_PER_OBJECT = 256  # so many token ids are copied in the time of one message
TEXTS_PER_OBJECT = 8  # texts and nulls in lists: 3 us of validation each
TOO_LONG = "context_length_exceeded"  # OpenAI's code, which clients know how to handle

# Fields that are rendered or tokenized, as one prompt; of a list in the second ones, each entry is a prompt.
_PROMPT_FIELDS = ("messages", "input", "prompt", "instructions", "suffix", "tools", "chat_template_kwargs", "tokens")
_SCORE_FIELDS = ("queries", "query", "documents", "items", "text_1", "text_2", "data_1", "data_2", "instruction")
_QUERY_FIELDS = frozenset(("queries", "query", "text_1", "data_1"))
_RESPONSES = (Operation.RESPONSES, Operation.INPUT_TOKENS)
_TRUNCATED_BY = {  # by operation: what truncates its prompt; of a score also the number of tokens of each text
    **dict.fromkeys(_RESPONSES, "truncation"),
    **dict.fromkeys((Operation.CHAT, Operation.COMPLETION, Operation.EMBEDDING), "truncate_prompt_tokens"),
    **dict.fromkeys((Operation.SCORE, Operation.RERANK), "truncate_prompt_tokens"),
}
# Fields whose lists have messages, items or content parts; and such lists within those.
_HAVE_PARTS = frozenset(("messages", "input", *_SCORE_FIELDS))
_LISTS_OF_PARTS = frozenset(("content", "output"))
# Media, in a part of one of these types, or of none; and what only OpenAI itself can read, in such a part or item.
MEDIA: dict[str, tuple[str | None, ...]] = {
    "image_url": ("image_url", "input_image", None),
    **{name: (name, None) for name in ("video_url", "audio_url", "input_audio")},
    **{name: (name, None) for name in ("image_embeds", "audio_embeds", "video_embeds")},
}
_UNREAD: dict[str, tuple[str | None, ...]] = {
    "file": ("file",),
    "file_data": ("input_file",),
    "encrypted_content": ("reasoning", "compaction"),
}
_NOT_TEXT = MEDIA | _UNREAD


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
        BadRequest: `param` is the prompt with too many messages, items, parts, token ids or bytes: the field, or its
            path in a list of prompts.
    """
    most_entries = ENTRIES_PER_TOKEN * max_model_len + SPARE_ENTRIES
    most_numbers = max_model_len + SPARE_ENTRIES
    most_bytes = MAX_TOKEN_BYTES * max_model_len + SPARE_BYTES
    for path, field, prompt in _prompts(operation, body):
        size = _size(prompt, field)
        truncates = _truncates(operation, body, field)
        if size.entries > most_entries:
            raise _too_long(path, f"{size.entries} messages, parts or other entries", most_entries, max_model_len)
        if size.numbers > most_numbers and not truncates:
            raise _too_long(path, f"{size.numbers} token ids", most_numbers, max_model_len)
        if size.text_bytes > most_bytes and not truncates:
            raise _too_long(path, f"{size.text_bytes} bytes of text", most_bytes, max_model_len)


def is_large(operation: Operation, body: Mapping[str, Any], times: int = 1) -> bool:
    """Whether reading this body would stop an event loop, or hold up the tokenizer, for longer than others notice, or
    for so many times as long. It looks at no more values than it takes to know that."""
    left = times * LARGE_OBJECTS * NUMBERS_PER_OBJECT
    chars = times * LARGE_TEXT_CHARS
    each = NUMBERS_PER_OBJECT * (2 if operation in _RESPONSES else 1)
    for node in _nodes(body.items()):
        left -= node.numbers + each * (node.kind is not str)
        if node.kind is list:
            left -= NUMBERS_PER_OBJECT // TEXTS_PER_OBJECT * (len(node.texts) + node.nulls)
        chars -= node.name_chars + sum(map(len, node.texts))
        if left < 0 or chars < 0:
            return True
    return False


def has_media(body: Mapping[str, Any]) -> bool:
    """Whether a content part of a body is an image, audio or video."""
    return any(node.has_media for node in _nodes(body.items()))


def text_bytes(text: str) -> int:
    """The bytes of a text in UTF-8, of surrogates that have no partner, too."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _too_long(path: str, found: str, most: int, max_model_len: int) -> BadRequest:
    return BadRequest(
        f"This model's maximum context length is {max_model_len} tokens. However, `{path}` has {found}, and no prompt"
        f" of that length has more than {most}.",
        param=path,
        code=TOO_LONG,
    )


def _prompts(operation: Operation, body: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Each prompt in a body, with its path and its field."""
    for field in (*_PROMPT_FIELDS, *_SCORE_FIELDS):
        value = body.get(field)
        if type(value) is not list:
            if value is not None:
                yield field, field, value
        elif _holds_prompts(operation, field, value):
            for number, prompt in enumerate(value):
                yield f"{field}.{number}", field, prompt
        else:
            yield field, field, value


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


def _truncates(operation: Operation, body: Mapping[str, Any], field: str) -> bool:
    """Whether the engine cuts the text of this field to so many tokens, before it tokenizes it."""
    if body.get(_TRUNCATED_BY.get(operation, "")) not in (None, "disabled"):
        return True
    each = body.get("max_tokens_per_query" if field in _QUERY_FIELDS else "max_tokens_per_doc")
    return operation.is_scoring and type(each) is int and each > 0


class _Node(NamedTuple):
    """An object, a list, or a text that is the whole of a field: its own texts, numbers and nulls, without those in the
    objects and lists in it (`inner` of them), and without media."""

    kind: type
    texts: list[str]
    numbers: int = 0  # and other values; nulls are among them
    nulls: int = 0
    inner: int = 0
    name_chars: int = 0
    has_media: bool = False


def _nodes(fields: Iterable[tuple[str, Any]]) -> Iterator[_Node]:
    """What fields of a body have in them."""
    left: list[tuple[Any, bool]] = []  # with whether it is, or has, a message, an item or a part
    for name, value in fields:
        if type(value) is str:
            yield _Node(str, [value], name_chars=len(name))
        elif type(value) is dict or type(value) is list:
            left.append((value, name in _HAVE_PARTS))
    while left:
        node, is_part = left.pop()
        if type(node) is list:
            texts = [child for child in node if type(child) is str]
            inner = [(child, is_part) for child in node if type(child) is dict or type(child) is list]
            others = len(node) - len(texts) - len(inner)
            yield _Node(list, texts, others, node.count(None) if others else 0, len(inner))
        else:
            not_text = _not_text(node) if is_part and not _NOT_TEXT.keys().isdisjoint(node) else ()
            texts = []
            inner = []
            others = 0
            for name, child in node.items():
                if name in not_text:
                    continue
                if type(child) is str:
                    texts.append(child)
                elif type(child) is dict or type(child) is list:
                    inner.append((child, is_part and name in _LISTS_OF_PARTS))
                else:
                    others += 1
            names = sum(map(len, node))
            is_media = not MEDIA.keys().isdisjoint(not_text)
            yield _Node(dict, texts, others, 0, len(inner), names, is_media)
        left += inner


def _not_text(part: Mapping[str, Any]) -> list[str]:
    """The names of a part that hold a medium, or what only OpenAI can read."""
    kind = part.get("type")
    return [name for name in part if name in _NOT_TEXT and kind in _NOT_TEXT[name]]


def _size(prompt: Any, field: str) -> _PromptSize:
    size = _PromptSize()
    for node in _nodes([(field, prompt)]):
        size.text_bytes += sum(map(text_bytes, node.texts)) + (node.name_chars if node.kind is dict else 0)
        if node.kind is list:
            size.entries += len(node.texts) + node.inner
            size.numbers += node.numbers
    return size
