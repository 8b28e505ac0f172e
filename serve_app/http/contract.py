"""Splits a request into the body forwarded to the engine and the contract between client and router.

Invariant: a forwarded body holds only fields of `FORWARDED`, so no client field reaches scheduling, caching or transfer
inside vLLM, whatever fields the next vLLM release reads; HTTP headers are never forwarded. The caller's dict is not
changed, and the whole request is checked before anything is forwarded.

Every field of vLLM 0.32.0's request models is in exactly one of these (a test compares them with the installed vLLM):

- `FORWARDED`: what to generate and how. vLLM checks the values, those of `logprobs` and `prompt_logprobs` too. Only
  what would harm a shared engine is refused here (found by fuzzing vLLM 0.32.0): some wrong shapes end in an error that
  names no field, and a request that passes must cost an engine time in proportion to its size.
- `CONSUMED`: the contract's fields in the body (`split` reads its headers). `priority` is a class name or 0 low .. 3
  critical, `service_tier` an OpenAI value or a class name. `priority` wins where both are given, yet both must be
  valid. "auto" means the key's default class. A class above the key's bound is a 403, never a silent demotion.
- `STRIPPED`: dropped without an error, since well-meaning vLLM clients send them; they reach the engine's internals or
  have no effect here.
- `REFUSED`: a 400 that names the field, since dropping it would give a different answer than requested. A null, false
  or empty value requests nothing and is dropped; so is an empty value of `NOTHING_IF_EMPTY`, which vLLM refuses.

Unknown fields are dropped, as vLLM ignores them. `store` and `previous_response_id` of a response are read before its
body comes here (`responses.memory`); `store` of another request does nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from serve_app.core.anthropic import chat_body, client_words
from serve_app.core.body_bounds import BodySize, body_size, check_prompt
from serve_app.core.grammar_bounds import MAX_GRAMMAR_BYTES, too_complex
from serve_app.core.score_inputs import INPUT_FIELDS
from serve_app.errors import BadRequest, Forbidden
from serve_app.http.agent_sessions import MAX_SESSION_ID_CHARS, agent_session
from serve_app.http.parameter_bounds import check_parameters
from serve_app.settings import HttpSettings
from serve_app.types import CLASS_ALIASES, SERVICE_TIERS, Contract, Identity, Operation, RequestClass

MAX_IDEMPOTENCY_KEY_CHARS = 255  # the bound of payment APIs, so their client code works here
MAX_DEADLINE_MS = 86_400_000  # a day, OpenAI's batch window; an absolute time in milliseconds is far above it
MAX_GRACE_MS = 30_000  # the default, too: a run without a reader holds its slot
COMPLETION_DEFAULT_TOKENS = 16  # OpenAI's and vLLM's default `max_tokens` of a completion

_FORWARDED_FOR: dict[str, str] = {
    "what to answer": "model messages prompt input tokens instructions suffix documents user metadata",
    "how to sample": "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty seed"
    " logit_bias bad_words allowed_token_ids n repetition_detection",
    "when to stop": "max_tokens max_completion_tokens max_output_tokens max_tool_calls min_tokens stop stop_token_ids"
    " ignore_eos include_stop_str_in_output thinking_token_budget",
    "tools, structure, reasoning": "tools tool_choice parallel_tool_calls response_format structured_outputs text"
    " reasoning reasoning_effort include_reasoning",
    "rendering the prompt, without a template of the client's": "chat_template_kwargs add_generation_prompt"
    " continue_final_message add_special_tokens echo truncation truncate_prompt_tokens truncation_side",
    "what the answer holds, in which pieces": "stream stream_options stream_interval include logprobs top_logprobs"
    " prompt_logprobs logprob_token_ids skip_special_tokens spaces_between_special_tokens return_token_ids"
    " return_tokens_as_token_ids return_prompt_text return_token_strs enable_response_messages",
    "pooling (vLLM removed the last one, and says so)": "dimensions encoding_format embed_dtype endianness"
    " use_activation padding task normalize",
    "scores": "queries items text_1 text_2 data_1 data_2 query top_n max_tokens_per_query max_tokens_per_doc"
    " instruction",
    "transcriptions": "file language to_language hotwords timestamp_granularities stream_include_usage"
    " stream_continuous_usage_stats",
    "Cohere's embeddings": "texts images inputs input_type output_dimension embedding_types truncate",
}
FORWARDED: frozenset[str] = frozenset(name for names in _FORWARDED_FOR.values() for name in names.split())

NOTHING_IF_EMPTY: frozenset[str] = frozenset({"suffix", "structured_outputs", "tools"})

CONSUMED: frozenset[str] = frozenset({"priority", "service_tier"})

STRIPPED: dict[str, str] = {
    "request_id": "names the request inside the engine; two alike abort each other; ours is unique",
    "session_id": "steers vLLM's own placement; the session comes by X-Session-Id",
    "cache_salt": "decides whose prefix cache is read; ours is the tenant's",
    "kv_transfer_params": "makes the engine fetch or hand over KV blocks, and takes token ids past the chat template",
    "ec_transfer_params": "the same for encoder caches",
    "vllm_xargs": "becomes SamplingParams.extra_args, where transfer parameters, plug-ins and tokens that a continued"
    " stream has produced are read from",
    "data_parallel_rank": "chooses an engine rank; routing is ours",
    "data": "read by plug-ins of vLLM alone, of which no engine here has one",
    "watermarking": "lets a caller opt out of a watermark that the operator has switched on",
    "routed_experts_prompt_start": "cuts expert-routing data, which is not returned here",
    "return_token_offsets": "read by vLLM's render routes alone",
    "mm_payload": "read by vLLM's render routes alone",
    "return_mm_kwargs": "read by vLLM's render routes alone",
    "length_penalty": "read by beam search alone",
    "prompt_cache_key": "vLLM does not read it; prefix caching needs no key",
    "store": "read before, see above; a chat is never kept",
}

_USE_PREVIOUS = "is not supported: use `previous_response_id`"
_UNTRUSTED = "is not accepted from clients"

REFUSED: dict[str, str] = {
    "use_beam_search": "is not supported: beams fork inside the engine, so their number cannot be admitted",
    "best_of": "is not supported: vLLM has no `best_of`, ask for `n` answers",
    "functions": "does nothing any more: use `tools`",
    "previous_response_id": "belongs to /v1/responses: send the whole conversation",
    "conversation": _USE_PREVIOUS,
    "previous_input_messages": _USE_PREVIOUS,
    "background": "belongs to /v1/responses",
    "prompt_embeds": f"{_UNTRUSTED}: it is a serialized tensor, send text or token ids",
    "chat_template": f"{_UNTRUSTED}: it is a program that runs on the server",
    "media_io_kwargs": f"{_UNTRUSTED}: it changes how media are loaded",
    "mm_processor_kwargs": f"{_UNTRUSTED}: it changes what preprocessing costs",
    **{
        f"guided_{name}": "does nothing any more: use `response_format` or `structured_outputs`"
        for name in ("json", "regex", "choice", "grammar", "decoding_backend", "whitespace_pattern")
    },
}

_OUTPUT_FIELDS: dict[Operation, tuple[str, ...]] = {
    Operation.CHAT: ("max_completion_tokens", "max_tokens"),
    Operation.COMPLETION: ("max_tokens",),
    Operation.RESPONSES: ("max_output_tokens",),
    Operation.MESSAGES: ("max_tokens",),
    Operation.TRANSCRIPTION: ("max_completion_tokens",),
    Operation.TRANSLATION: ("max_completion_tokens",),
}
_MESSAGE_FIELDS = ("messages", "input")
_GRAMMAR_FIELDS = ("response_format", "structured_outputs", "text")  # of tools the engine knows which are enforced
_VISIBLE = re.compile(rb"[\x21-\x7e]+")
_CLASS_NAMES = ", ".join(CLASS_ALIASES)
_HIGHEST_CLASS = max(RequestClass)


def split(
    operation: Operation,
    body: Mapping[str, Any],
    headers: Mapping[bytes, bytes],
    identity: Identity,
    bounds: HttpSettings,
    max_model_len: int = sys.maxsize,
) -> tuple[dict[str, Any], Contract, BodySize]:
    """The body to forward, the contract, and the size of that body.

    Args:
        headers: by name in lower case.
        max_model_len: of the model, in tokens; bounds the prompt, and an output bound set here is never above it.

    `Contract.deadline_s` counts from the arrival. A request without a bound of its own is forwarded with
    `bounds.default_output_tokens`, or else `bounds.max_output_tokens`, if they are set.

    A Messages request is forwarded as the chat completion that it is (`core.anthropic`).

    Raises:
        BadRequest: a refused field or a wrong value; `param` is the field or the header.
        Forbidden: a class above `identity.max_class`; `param` is the field.
    """
    session_id = session_of(headers, body)
    if operation.is_anthropic:
        body = chat_body(operation, body)
    clean, size = _forwarded(operation, body, bounds, max_model_len)
    request_class = class_of(body, identity)
    contract = Contract(
        request_class=request_class,
        session_id=session_id,
        deadline_s=_seconds(headers, b"x-deadline-ms", "X-Deadline-Ms", 1, MAX_DEADLINE_MS, " from now"),
        idempotency_key=idempotency_key(headers),
        grace_s=_seconds(headers, b"x-disconnect-grace-ms", "X-Disconnect-Grace-Ms", 0, MAX_GRACE_MS),
        replay_only=_is_set(headers, b"x-replay-only", "X-Replay-Only"),
        queue_status=_is_set(headers, b"x-queue-status", "X-Queue-Status")
        and operation.generates
        and clean.get("stream") is True,
        service_tier=None if body.get("service_tier") is None else SERVICE_TIERS[request_class],
    )
    return clean, contract, size


def _forwarded(
    operation: Operation, body: Mapping[str, Any], bounds: HttpSettings, max_model_len: int
) -> tuple[dict[str, Any], BodySize]:
    """The body to forward, and its size. Raises BadRequest."""
    try:
        return _checked(operation, body, bounds, max_model_len)
    except BadRequest as error:
        if operation.is_anthropic:
            error.message = client_words(error.message)
            error.param = None if error.param is None else client_words(error.param)
        raise


def _checked(
    operation: Operation, body: Mapping[str, Any], bounds: HttpSettings, max_model_len: int
) -> tuple[dict[str, Any], BodySize]:
    """As `_forwarded`; errors name fields of `body`."""
    clean = {
        name: value for name, value in body.items() if name in FORWARDED and (value or name not in NOTHING_IF_EMPTY)
    }
    if len(clean) != len(body):
        for name in body.keys() & REFUSED.keys():
            value = body[name]
            if value and not (name == "best_of" and type(value) is int and value == 1):
                raise BadRequest(f"`{name}` {REFUSED[name]}", param=name)
    size = body_size(operation, clean)
    check_prompt(operation, clean, size, max_model_len)
    check_values(operation, clean)
    _bound_output(operation, clean, bounds, max_model_len)
    return clean, size


def session_of(headers: Mapping[bytes, bytes], body: Mapping[str, Any]) -> str | None:
    """The session that a client names, in `X-Session-Id` or as its agent does; None: none. Raises BadRequest."""
    found = _header_text(headers, b"x-session-id", "X-Session-Id", MAX_SESSION_ID_CHARS)
    return agent_session(headers, body) if found is None else found


def idempotency_key(headers: Mapping[bytes, bytes]) -> str | None:
    """Raises BadRequest."""
    return _header_text(headers, b"idempotency-key", "Idempotency-Key", MAX_IDEMPOTENCY_KEY_CHARS)


def check_values(operation: Operation, clean: Mapping[str, Any]) -> None:
    """Refuse fields that are forwarded for another operation or value, wrong shapes that vLLM's own validation does not
    handle, grammars too large for any engine (most too costly grammars are found when they are compiled,
    `engine.grammar_queue`), and parameters above the bounds of `parameter_bounds`.

    Raises:
        BadRequest: `param` is the field or its path.
    """
    template = clean.get("chat_template_kwargs")
    if type(template) is dict and template.get("chat_template") is not None:
        name = "chat_template_kwargs.chat_template"
        raise BadRequest(f"`{name}` {REFUSED['chat_template']}", param=name)
    if operation in (Operation.RESPONSES, Operation.INPUT_TOKENS) and clean.get("prompt") is not None:
        raise BadRequest("`prompt` is not supported here: no prompt templates are stored, use `input`", param="prompt")
    if operation in (Operation.EMBEDDING, Operation.POOLING) and clean.get("encoding_format") not in (
        None,
        "float",
        "base64",
    ):
        raise BadRequest('`encoding_format` must be "float" or "base64"', param="encoding_format")
    for name in (*_MESSAGE_FIELDS, *INPUT_FIELDS.get(operation, ())):
        _refuse_media_ids(name, clean.get(name))
    if type(clean.get("messages", [])) is not list:
        raise BadRequest("`messages` must be an array of messages", param="messages")
    if clean.get("structured_outputs") is not None and type(clean["structured_outputs"]) is not dict:
        raise BadRequest("`structured_outputs` must be an object", param="structured_outputs")
    if operation in (Operation.RESPONSES, Operation.INPUT_TOKENS):
        _refuse_references(clean.get("input"))
    _require_schema(clean)
    check_parameters(clean)
    for name in _GRAMMAR_FIELDS:
        if name in clean and len(repr(clean[name])) > MAX_GRAMMAR_BYTES:
            raise too_complex(f"`{name}` has more than {MAX_GRAMMAR_BYTES} bytes", name)


def _refuse_media_ids(path: str, value: Any) -> None:
    """Refuse a `uuid` of a content part, in a message or in lists of them: vLLM takes it for the name of an image,
    audio or video in caches that all tenants share, so it would read another tenant's, or put one in place of another
    tenant's."""
    if type(value) is list:
        for number, item in enumerate(value):
            if type(item) in (dict, list):
                _refuse_media_ids(f"{path}.{number}", item)
    content = value.get("content") if type(value) is dict else None
    for index, part in enumerate(content if type(content) is list else ()):
        if type(part) is dict and part.get("uuid") is not None:
            name = f"{path}.content.{index}.uuid"
            raise BadRequest(f"`{name}` {_UNTRUSTED}: send the medium itself", param=name)


def _refuse_references(items: Any) -> None:
    """Refuse references to a stored item without its id: those with one have been replaced."""
    for number, item in enumerate(items if type(items) is list else ()):
        if type(item) is dict and item.get("type") == "item_reference":
            raise BadRequest(
                f"`input.{number}.id` must be a string, the id of a stored item", param=f"input.{number}.id"
            )


def _require_schema(clean: Mapping[str, Any]) -> None:
    """Refuse a format of type `json_schema` without a schema: vLLM says so in the words of its own classes."""
    of_chat = clean.get("response_format")
    of_responses = _field(clean.get("text"), "format")
    places = (
        ("response_format.json_schema", of_chat, _field(of_chat, "json_schema")),
        ("text.format", of_responses, of_responses),
    )
    for path, chosen, holder in places:
        if _field(chosen, "type") == "json_schema" and (holder is None or type(holder) is dict):
            missing = path if holder is None else f"{path}.schema"
            if _field(holder, "schema") is None:
                raise BadRequest(f"`{missing}` is missing", param=missing)


def _field(value: Any, name: str) -> Any:
    return value.get(name) if type(value) is dict else None


def _bound_output(operation: Operation, clean: dict[str, Any], bounds: HttpSettings, max_model_len: int) -> None:
    cap = bounds.max_output_tokens
    default = bounds.default_output_tokens
    names = _OUTPUT_FIELDS.get(operation, ())
    given = [name for name in names if clean.get(name) is not None]
    for name in given:
        value = clean[name]
        if type(value) is not int:
            raise BadRequest(f"`{name}` must be an integer", param=name)
        if cap is not None and value > cap:
            raise BadRequest(f"`{name}` is {value}, {cap} output tokens are allowed in one request", param=name)
    if names and not given and (cap is not None or default is not None):
        if default is None and operation is Operation.COMPLETION and names[0] not in clean:
            default = COMPLETION_DEFAULT_TOKENS
        # vLLM refuses a bound above the model's
        clean[names[0]] = min(max_model_len, *(bound for bound in (cap, default) if bound is not None))


def class_of(body: Mapping[str, Any], identity: Identity) -> RequestClass:
    """The class that a body requests by `priority` or `service_tier`; a row of a batch is `low` whatever it requests.
    Raises as `split`."""
    wanted = identity.default_class
    field = None
    for name in ("service_tier", "priority"):  # the last one given counts
        value = body.get(name)
        if value is not None:
            wanted = _class_named(name, value, identity)
            field = name
    if identity.is_row:
        return RequestClass.LOW
    if field is not None and wanted > identity.max_class:
        raise Forbidden(
            f"`{field}` asks for class {wanted.label!r}, this API key may ask for {identity.max_class.label!r} at most",
            param=field,
        )
    return wanted


def _class_named(field: str, value: Any, identity: Identity) -> RequestClass:
    if type(value) is str and value in CLASS_ALIASES:
        return identity.default_class if value == "auto" else CLASS_ALIASES[value]
    if field == "priority" and type(value) is int and 0 <= value <= _HIGHEST_CLASS:
        return RequestClass(value)
    numbers = f", or a whole number from 0 to {int(_HIGHEST_CLASS)}" if field == "priority" else ""
    raise BadRequest(f"`{field}` must be one of {_CLASS_NAMES}{numbers}", param=field)


def _header_text(headers: Mapping[bytes, bytes], name: bytes, shown: str, max_chars: int) -> str | None:
    value = headers.get(name)
    if value is None:
        return None
    if len(value) > max_chars or _VISIBLE.fullmatch(value) is None:
        raise BadRequest(f"{shown} must be 1 to {max_chars} visible ASCII characters", param=shown)
    return value.decode("ascii")


def _seconds(
    headers: Mapping[bytes, bytes], name: bytes, shown: str, least: int, most: int, since: str = ""
) -> float | None:
    """The seconds of a header in milliseconds; None: it is not there. Raises BadRequest."""
    value = headers.get(name)
    if value is None:
        return None
    if not value.isdigit() or len(value) > len(str(most)) or not least <= int(value) <= most:
        raise BadRequest(f"{shown} must be a whole number of milliseconds{since}, {least} to {most}", param=shown)
    return int(value) / 1000


def _is_set(headers: Mapping[bytes, bytes], name: bytes, shown: str) -> bool:
    value = headers.get(name, b"0")
    if value not in (b"0", b"1"):
        raise BadRequest(f"{shown} must be 1, or 0 as without it", param=shown)
    return value == b"1"
