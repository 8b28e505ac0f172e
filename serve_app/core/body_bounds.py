"""Bounds the prompt of a request by what its model could hold, before anything validates, renders or tokenizes it.

That work costs microseconds a byte and up to a tenth of a millisecond an entry, of an event loop that all tenants
share, and vLLM compares the prompt with the model's length only after it. Here `body_size` visits each value once. What
passes and is still large is read in a process of its own.

Invariant: a prompt that fits the model passes. A token may have `MAX_TOKEN_BYTES` bytes; entries and text may become no
token at all, up to `SPARE_ENTRIES` and `SPARE_BYTES`. Text that its operation truncates fits, however long it is. Each
prompt of a list is bounded by itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve_app.errors import BadRequest
from serve_app.types import Operation

BYTES_PER_TOKEN = 4  # of English text in current vocabularies; other scripts have more bytes and more tokens
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
EMBED_FIELDS = ("texts", "images", "inputs")  # of Cohere's embeddings, one of which a request has
_BOUNDED_FIELDS = frozenset((*_PROMPT_FIELDS, *_SCORE_FIELDS, *EMBED_FIELDS))
_QUERY_FIELDS = frozenset(("queries", "query", "text_1", "data_1"))
_RESPONSES = (Operation.RESPONSES, Operation.INPUT_TOKENS)
_TRUNCATED_BY = {  # by operation: what truncates its prompt; of a score also the number of tokens of each text
    **dict.fromkeys(_RESPONSES, "truncation"),
    **dict.fromkeys((Operation.CHAT, Operation.COMPLETION, Operation.EMBEDDING), "truncate_prompt_tokens"),
    **dict.fromkeys((Operation.POOLING, Operation.CLASSIFY), "truncate_prompt_tokens"),
    **dict.fromkeys((Operation.SCORE, Operation.RERANK), "truncate_prompt_tokens"),
}
# Fields whose lists have messages, items or content parts; and such lists within those.
_HAVE_PARTS = frozenset(("messages", "input", "inputs", *_SCORE_FIELDS))
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
_SIZED = (str, list, dict)


class PromptSize(NamedTuple):
    """Of the value of a field, or of one prompt of a list in it.

    Args:
        entries: of its lists, which are texts or objects; `numbers` in its lists.
        text_bytes: and characters of text, names included.
        work: to validate and render it; an object is `NUMBERS_PER_OBJECT`.
        has_media: a content part in it is an image, audio or video.
    """

    entries: int
    numbers: int
    text_bytes: int
    chars: int
    work: int
    has_media: bool


@dataclass(frozen=True, slots=True)
class BodySize:
    """Of each field of a body: one size, or that of each prompt, if it is a list of prompts."""

    fields: Mapping[str, Sequence[PromptSize]]

    def is_large(self, times: int = 1) -> bool:
        """Whether reading this body would stop an event loop, or hold up the tokenizer, for longer than others notice,
        or for so many times as long."""
        sizes = [size for sizes in self.fields.values() for size in sizes]
        work = sum(size.work for size in sizes)
        chars = sum(size.chars for size in sizes)
        return work > times * LARGE_OBJECTS * NUMBERS_PER_OBJECT or chars > times * LARGE_TEXT_CHARS

    @property
    def has_media(self) -> bool:
        """Whether a content part of the body is an image, audio or video."""
        return any(size.has_media for sizes in self.fields.values() for size in sizes)

    def part(self, lists: Collection[str], start: int, end: int) -> BodySize:
        """Of the body that has only these prompts of these lists."""
        return BodySize({
            field: sizes[start:end] if field in lists else sizes for field, sizes in self.fields.items()
        })  # fmt: skip


def is_large(operation: Operation, body: Mapping[str, Any]) -> bool:
    """As `BodySize.is_large`. In each field it looks at no more values than it takes to know that."""
    return body_size(operation, body, LARGE_OBJECTS * NUMBERS_PER_OBJECT).is_large()


def body_size(operation: Operation, body: Mapping[str, Any], most_work: float = math.inf) -> BodySize:
    """O(values of the body). `most_work`: what is beyond it in a prompt is not counted."""
    per_object = NUMBERS_PER_OBJECT * (2 if operation in _RESPONSES else 1)
    return BodySize({
        field: [_size(prompt, field, per_object, most_work) for prompt in value]
        if _holds_prompts(operation, field, value)
        else [_size(value, field, per_object, most_work)]
        for field, value in body.items()
        if type(value) in _SIZED
    })  # fmt: skip


def check_prompt(operation: Operation, body: Mapping[str, Any], size: BodySize, max_model_len: int) -> None:
    """Refuse a prompt that is longer than any that fits the model.

    Args:
        size: of the body.
        max_model_len: tokens of the model's longest sequence.

    Raises:
        BadRequest: `param` is the prompt with too many messages, items, parts, token ids or bytes: the field, or its
            path in a list of prompts.
    """
    most_entries = ENTRIES_PER_TOKEN * max_model_len + SPARE_ENTRIES
    most_numbers = max_model_len + SPARE_ENTRIES
    most_bytes = MAX_TOKEN_BYTES * max_model_len + SPARE_BYTES
    for field in filter(_BOUNDED_FIELDS.__contains__, size.fields):
        truncates = _truncates(operation, body, field)
        for number, prompt in enumerate(size.fields[field]):
            if prompt.entries > most_entries:
                found = f"{prompt.entries} messages, parts or other entries"
                most = most_entries
            elif prompt.numbers > most_numbers and not truncates:
                found = f"{prompt.numbers} token ids"
                most = most_numbers
            elif prompt.text_bytes > most_bytes and not truncates:
                found = f"{prompt.text_bytes} bytes of text"
                most = most_bytes
            else:
                continue
            path = f"{field}.{number}" if _holds_prompts(operation, field, body[field]) else field
            raise BadRequest(
                f"This model's maximum context length is {max_model_len} tokens. However, `{path}` has {found}, and no"
                f" prompt of that length has more than {most}.",
                param=path,
                code=TOO_LONG,
            )


def text_bytes(text: str) -> int:
    """The bytes of a text in UTF-8, of surrogates that have no partner, too."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _holds_prompts(operation: Operation, field: str, value: Any) -> bool:
    """Whether a value is a list of prompts; their number has a bound of its own (`http.request_size`)."""
    if type(value) is not list:
        return False
    match operation:
        case Operation.COMPLETION:
            return field == "prompt" and any(type(one) in (str, list) for one in value[:1])
        case Operation.EMBEDDING:
            return field in ("input", "messages") and any(type(one) in (str, list) for one in value[:1])
        case Operation.POOLING | Operation.CLASSIFY:
            return field == "input" and any(type(one) in (str, list) for one in value[:1])
        case Operation.EMBED:
            return field in EMBED_FIELDS
        case Operation.SCORE | Operation.RERANK:
            return field in _SCORE_FIELDS
    return False


def _truncates(operation: Operation, body: Mapping[str, Any], field: str) -> bool:
    """Whether the engine cuts the text of this field to so many tokens, before it tokenizes it."""
    if operation is Operation.EMBED:
        return body.get("truncate") != "NONE"
    if body.get(_TRUNCATED_BY.get(operation, "")) not in (None, "disabled"):
        return True
    each = body.get("max_tokens_per_query" if field in _QUERY_FIELDS else "max_tokens_per_doc")
    return operation.is_scoring and type(each) is int and each > 0


def _not_text(part: Mapping[str, Any]) -> list[str]:
    """The names of a part that hold a medium, or what only OpenAI can read."""
    kind = part.get("type")
    return [name for name in part if name in _NOT_TEXT and kind in _NOT_TEXT[name]]


def _size(prompt: Any, field: str, per_object: int, most_work: float) -> PromptSize:
    if field == "images" and type(prompt) is str:
        return PromptSize(1, 0, 0, 0, per_object, has_media=True)
    texts = [prompt] if type(prompt) is str else []
    # with whether it is, or has, a message, an item or a part
    left = [(prompt, field in _HAVE_PARTS)] if type(prompt) in (list, dict) else []
    entries = numbers = name_chars = work = 0
    has_media = False
    while left and work <= most_work:
        node, is_part = left.pop()
        work += per_object
        if type(node) is list:
            objects = list(map(type, node)).count(dict) if most_work < math.inf else 0
            if objects * per_object > most_work:
                work += objects * per_object  # whatever they are
                break
            own = [child for child in node if type(child) is str]
            inner = [(child, is_part) for child in node if type(child) is dict or type(child) is list]
            others = len(node) - len(own) - len(inner)
            nulls = node.count(None) if others else 0
            entries += len(own) + len(inner)
            numbers += others
            work += others + NUMBERS_PER_OBJECT // TEXTS_PER_OBJECT * (len(own) + nulls)
            texts += own
            left += inner
            continue
        not_text = _not_text(node) if is_part and not _NOT_TEXT.keys().isdisjoint(node) else ()
        for name, child in node.items():
            if name in not_text:
                continue
            if type(child) is str:
                texts.append(child)
            elif type(child) is dict or type(child) is list:
                left.append((child, is_part and name in _LISTS_OF_PARTS))
            else:
                work += 1
        name_chars += sum(map(len, node))
        has_media |= not MEDIA.keys().isdisjoint(not_text)
    size = sum(map(text_bytes, texts)) + name_chars
    return PromptSize(entries, numbers, size, sum(map(len, texts)) + name_chars, work, has_media)
