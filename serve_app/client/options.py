"""The keywords of the calls by handle, for readers and type checkers: OpenAI's fields and vLLM's additions.

OpenAI's and vLLM's documentation describe the fields; `serve_app/http/contract.py` lists those served. A field missing
here goes into `extra_body`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Messages = Sequence[Any]  # OpenAI's message objects: dicts, or messages of earlier answers
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Priority = str | int
# Of a map: a text, token ids, messages, or a mapping with `prompt`, `messages` or `input` and other fields.
MapItem = str | Sequence[Any] | Mapping[str, Any]


class CallOptions(TypedDict, total=False):
    """Options of every call."""

    model: str | None
    priority: Priority | None
    session: str | None
    deadline_s: float | None
    idempotency_key: str  # a repeat within ten minutes gets the same answer, not a second run; made here if not given
    extra_body: Mapping[str, Any]  # fields merged over the body unchecked
    user: str


class SamplingOptions(CallOptions, total=False):
    """Options of every generating call."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    n: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    logit_bias: Mapping[str, float]
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    prompt_logprobs: int
    structured_outputs: Mapping[str, Any]
    response_format: Mapping[str, Any]
    stream_options: Mapping[str, Any]
    service_tier: str
    skip_special_tokens: bool
    return_token_ids: bool
    add_special_tokens: bool
    truncate_prompt_tokens: int


class ChatOptions(SamplingOptions, total=False):
    """Options of `chat` and `stream`."""

    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    reasoning_effort: str
    include_reasoning: bool
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    documents: Sequence[Mapping[str, str]]


class CompletionOptions(SamplingOptions, total=False):
    """Options of `complete` and `stream_complete`."""

    logprobs: int
    echo: bool
    suffix: str


class EmbedOptions(CallOptions, total=False):
    """Options of `embed`."""

    dimensions: int
    encoding_format: Literal["float", "base64"]
    truncate_prompt_tokens: int
    add_special_tokens: bool


class SessionOptions(TypedDict, total=False):
    """Options of `session`."""

    model: str | None
    vram_gb: float | None
    kv_tokens: int | None
    ttl_s: float | None
    wait_s: float | None
