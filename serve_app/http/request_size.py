"""Counts what is in a body: sequences, bytes, the client's bound, and the beginning that other requests may share.

Invariant: for any JSON body, `sequence_count` raises only `BadRequest` and the other functions raise nothing: misplaced
values count as nothing here, and vLLM refuses them by name.

The counts are for admission and routing, made in microseconds for each request, without a tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from serve_app.core.body_bounds import BYTES_PER_TOKEN, EMBED_FIELDS, MEDIA, text_bytes
from serve_app.core.images import data_url_pixels, image_tokens
from serve_app.core.score_inputs import INPUT_FIELDS, ScoreInputs
from serve_app.errors import BadRequest
from serve_app.settings import HttpSettings
from serve_app.types import Operation

MESSAGE_BYTES = 16  # role and markers of a chat template around a message are about four tokens
# Of an image that is not in the body, of audio or video: an image of a megapixel is 256 to 1,300 in current models.
MEDIA_TOKENS = 1024
PREFIX_CHARS = 2048  # of each leading message: 512 tokens distinguish conversations, and hashing more costs more
PREFIX_MESSAGES = 8  # there are usually one or two system and developer messages; a bound for other callers
PREFIX_TOKEN_IDS = 512  # the same length for a prompt of token ids
_DIGEST_BYTES = 16  # a collision only costs a worse route
_LEADING_ROLES = ("system", "developer")
_OUTPUT_BOUNDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_INPUT_FIELDS = ("prompt", "input", "messages", "tokens", "texts", "inputs")
# Fields of a forwarded body that never become a part of the model's input, whatever the template. A field that is
# missing here makes an estimate too high, and no prompt unseen.
_NOT_RENDERED_NAMES = (
    "model user metadata stop stop_token_ids bad_words logit_bias allowed_token_ids logprob_token_ids"
    " repetition_detection structured_outputs response_format text tool_choice stream_options include"
    " encoding_format embed_dtype endianness task truncation truncation_side reasoning"
    " input_type output_dimension embedding_types truncate"
)
_NOT_RENDERED = frozenset(_NOT_RENDERED_NAMES.split())
# In vLLM's content parts: what names a medium, as the part's type or as one of its fields.
MEDIA_FIELDS = (*MEDIA, "input_image", "image_pil", "prompt_embeds")
# Of a message and its parts: in `MESSAGE_BYTES`, or what no engine here reads.
_MARKERS = ("role", "type", "encrypted_content")


def sequence_count(operation: Operation, body: Mapping[str, Any], bounds: HttpSettings) -> int:
    """The number of sequences in the engine's batch: `n` x prompts; 0 if the operation takes none. Of a score, see
    `text_count`.

    Raises:
        BadRequest: more than `bounds.max_sequences`, or `n` is not a positive integer; `param` is the field at fault.
    """
    if not operation.takes_slot or operation is Operation.RESPONSES or operation.hears:
        return int(operation.takes_slot)
    field, prompts = _prompts(operation, body)
    n = body.get("n") if operation.generates else None
    if n is None:
        n = 1
    elif type(n) is not int or n < 1:
        raise BadRequest("`n` must be a positive integer", param="n")
    if operation.is_pooling:
        return _inputs(field, prompts, bounds)
    if n * prompts > bounds.max_sequences:
        shown = n if n < 2**63 else "too many"
        asked = f"{shown} x {prompts} (`n` times the prompts in `{field}`)" if n > 1 else f"{prompts} in `{field}`"
        raise BadRequest(
            f"one request may ask for {bounds.max_sequences} sequences, this one asks for {asked}",
            param="n" if n > 1 else field,
        )
    return n * prompts


def text_count(texts: ScoreInputs, bounds: HttpSettings) -> int:
    """The number of texts of a score, each a sequence: an embedding model embeds queries and documents apart (a
    cross-encoder has fewer, one for each pair). Raises as `sequence_count`."""
    return _inputs(texts.longer_field, len(texts.queries) + len(texts.documents), bounds)


def prompt_bytes(operation: Operation, body: Mapping[str, Any]) -> int:
    """The size of what may reach the model's input, in bytes of UTF-8: every text and object of a forwarded body but
    those of `_NOT_RENDERED`. A token id counts as `BYTES_PER_TOKEN`, an image in the body by its pixels, another
    medium as `MEDIA_TOKENS` of them."""
    inputs = INPUT_FIELDS.get(operation, _INPUT_FIELDS)
    size = 0
    for name, value in body.items():
        if not value or name in _NOT_RENDERED:
            continue
        if type(value) is str:
            size += text_bytes(value)
        elif name in inputs:
            size += prompt_size(_listed(value))
        elif name == "images" and type(value) is list:
            size += sum(entry_size(name, one) for one in value)
        elif type(value) is list or type(value) is dict:  # tools, documents, values for the template
            size += _json_size(value)
    return size


def output_bound(body: Mapping[str, Any]) -> int | None:
    """The client's bound on output tokens per answer, at least 0; None: it sets no bound."""
    given = [body[name] for name in _OUTPUT_BOUNDS if type(body.get(name)) is int]
    return max(given[0], 0) if given else None


def prefix_key(operation: Operation, body: Mapping[str, Any]) -> str:
    """The same 32 hex digits for requests with a common beginning, so that routing can send them where that prefix is
    cached; empty if there is no reusable prefix.

    For a conversation it covers the leading system and developer messages and the first message after them, each up to
    `PREFIX_CHARS`, independent of the form of their content: it stays the same from turn to turn and differs between
    conversations under one system prompt. For a prompt it covers its beginning.
    """
    match operation:
        case Operation.CHAT | Operation.MESSAGES:
            parts = _leading(body.get("messages"))
        case Operation.RESPONSES:
            parts = [_lead(body.get("instructions")), *_leading(body.get("input"))]
        case Operation.COMPLETION:
            parts = [_lead(body.get("prompt"))]
        case _:
            return ""
    if not any(parts):
        return ""
    data = "\x1e".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _inputs(field: str, count: int, bounds: HttpSettings) -> int:
    """The number of texts that a pooling model reads. Raises BadRequest: more than `bounds.max_embedding_inputs`."""
    most = bounds.max_embedding_inputs
    if count > most:
        raise BadRequest(f"one request may have {most} inputs, this one has {count} (`{field}`)", param=field)
    return count


def entry_size(field: str, entry: Any) -> int:
    """The bytes of an entry in a list of prompts, texts or images."""
    return BYTES_PER_TOKEN * _media_tokens(entry) if field == "images" else prompt_size(_listed(entry))


def list_field(operation: Operation, body: Mapping[str, Any]) -> str:
    """The field whose list has a sequence for each entry."""
    if operation is Operation.EMBED:
        return next((name for name in EMBED_FIELDS if body.get(name) is not None), EMBED_FIELDS[0])
    if operation is Operation.COMPLETION:
        return "prompt"
    return "messages" if operation is Operation.EMBEDDING and body.get("messages") is not None else "input"


def _listed(value: Any) -> Any:
    """One multimodal query or document as a list of it."""
    return [value] if type(value) is dict else value


def _prompts(operation: Operation, body: Mapping[str, Any]) -> tuple[str, int]:
    if operation is Operation.COMPLETION:
        return "prompt", _count_some("prompt", body)
    if operation is Operation.EMBED:
        field = list_field(operation, body)
        entries = body.get(field)
        return field, max(_count_some(field, body), len(entries) if type(entries) is list else 1)
    if operation.is_pooling:  # if both fields are there, vLLM takes the one that parses: count the larger
        inputs = _count_some("input", body)
        messages = _count_some("messages", body)
        return ("input", inputs) if inputs >= messages else ("messages", messages)
    return "messages", 1


def _count_some(field: str, body: Mapping[str, Any]) -> int:
    value = body.get(field)
    if type(value) is list and not value:
        raise BadRequest(f"`{field}` is an empty list", param=field)
    return _count(value)


def _count(value: Any) -> int:
    """The number of prompts in a field: a list of numbers is one prompt of token ids, a list of messages one chat."""
    return len(value) if type(value) is list and value and type(value[0]) not in (int, dict) else 1


def prompt_size(value: Any) -> int:
    """The bytes of a prompt in any form: a string, token ids, messages, or a list of those."""
    if type(value) is str:
        return text_bytes(value)
    if type(value) is not list or not value:
        return 0
    if type(value[0]) is int:
        return BYTES_PER_TOKEN * len(value)
    size = 0
    for item in value:
        if type(item) is dict:
            size += _message_size(item)
        elif type(item) is str:
            size += text_bytes(item)
        elif type(item) is list and item:  # one level only: a list in a list is a batch; vLLM accepts no deeper
            ids = type(item[0]) is int
            size += BYTES_PER_TOKEN * len(item) if ids else sum(_message_size(m) for m in item if type(m) is dict)
    return size


def _message_size(message: dict[str, Any]) -> int:
    calls = message.get("tool_calls")
    size = MESSAGE_BYTES + _part_size({**message, "tool_calls": None} if calls else message)
    return size + _json_size(calls) if calls else size


def _part_size(part: dict[str, Any]) -> int:
    """The texts and media of a message or a part of one, at any depth."""
    size = 0
    for name, value in part.items():
        if not value or name in _MARKERS:
            continue
        if name in MEDIA_FIELDS:
            size += BYTES_PER_TOKEN * _media_tokens(value)
        elif type(value) is str:
            size += text_bytes(value)
        elif type(value) is dict:
            size += _part_size(value)
        elif type(value) is list:
            size += sum(_part_size(one) if type(one) is dict else prompt_size(one) for one in value)
    return size


def _media_tokens(value: Any) -> int:
    """Of an image by its pixels, where it says how many; of another medium always as many."""
    url = value.get("url") if type(value) is dict else value
    pixels = data_url_pixels(url) if type(url) is str else 0
    return image_tokens(pixels) if pixels else MEDIA_TOKENS


def _json_size(value: Any) -> int:
    """As a template renders an object."""
    return len(msgspec.json.encode(value))


def _texts(content: Any) -> Iterator[str]:
    """The texts of a message's content: a string, or a list of strings and of parts that hold one."""
    if type(content) is str:
        yield content
    elif type(content) is list:
        for part in content:
            text = part.get("text") if type(part) is dict else part
            if type(text) is str:
                yield text


def _leading(messages: Any) -> list[str]:
    if type(messages) is not list:
        return [_lead(messages)]
    parts: list[str] = []
    for message in messages[:PREFIX_MESSAGES]:
        if type(message) is not dict:
            break
        role = message.get("role")
        parts += [role if type(role) is str else "", _joined(message.get("content"))]
        if role not in _LEADING_ROLES:
            break
    return parts


def _joined(content: Any) -> str:
    if type(content) is str:
        return content[:PREFIX_CHARS]
    parts = content[:PREFIX_CHARS] if type(content) is list else None
    return "".join([text[:PREFIX_CHARS] for text in _texts(parts)])[:PREFIX_CHARS]


def _lead(prompt: Any) -> str:
    if type(prompt) is list and prompt and type(prompt[0]) is not int:
        prompt = prompt[0]
    if type(prompt) is str:
        return prompt[:PREFIX_CHARS]
    return ",".join(map(str, prompt[:PREFIX_TOKEN_IDS])) if type(prompt) is list else ""
