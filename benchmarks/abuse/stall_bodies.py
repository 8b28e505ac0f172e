"""Requests of `benchmarks.abuse --stalls`: each one costs a server much before, or beside, the steps of the model.

Invariant: a request is built once and is the same bytes whenever it is sent.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
TOKENIZE = "/tokenize"
INPUT_TOKENS = "/v1/responses/input_tokens"
GZIP_FROM_BYTES = 16_384  # smaller bodies cost less to send than to compress
ITEM = {"role": "user", "content": "a"}
LARGE_TEXT = "word " * 50_000  # far above the 64 kB from which on a helper process reads a request

# The bounds of `bad_words` and of the log probabilities of a prompt, as of `serve_app.http` and the engine.
BAD_WORDS = 128
BAD_WORDS_BYTES = 32_768
PROMPT_ENTRIES = 49_152  # entries: tokens x log probabilities of each x answers
TOP_LOGPROBS = 20
ANSWERS = 2  # with one answer of 20 log probabilities, 2,048 tokens stay below the bound
BYTE_TOKENS = range(16, 240)  # token ids of plain bytes in the built-in model's vocabulary


@dataclass(frozen=True, slots=True)
class Asked:
    """One request without its model."""

    path: str
    body: Mapping[str, Any]


def chat(messages: int = 1, **more: Any) -> Asked:
    """A chat of so many small messages."""
    return Asked(CHAT, {"messages": [ITEM] * messages, "max_tokens": 4, **more})


TRIVIAL = chat()
LARGE = Asked(TOKENIZE, {"prompt": LARGE_TEXT})


def arms() -> dict[str, Asked | None]:
    """What the abusers of each arm send; None: nobody abuses."""
    ids = [BYTE_TOKENS[n % len(BYTE_TOKENS)] for n in range(PROMPT_ENTRIES // TOP_LOGPROBS // ANSWERS)]
    of_prompt = {"prompt": ids, "n": ANSWERS, "max_tokens": 1}
    word = (b"abcdefgh" * (BAD_WORDS_BYTES // BAD_WORDS))[: BAD_WORDS_BYTES // BAD_WORDS].decode()
    repetition = {"max_pattern_size": 10**9, "min_pattern_size": 1, "min_count": 2}
    long_answer = {"max_tokens": 200, "ignore_eos": True}
    return {
        "nobody": None,
        "responses_40000_items": Asked(RESPONSES, {"input": [ITEM] * 40_000}),
        "responses_4000_items": Asked(RESPONSES, {"input": [ITEM] * 4_000}),
        "chat_80000_messages": chat(80_000),
        "chat_3000_messages": chat(3_000),
        "chat_500_messages": chat(500),
        "bad_words_800_kb": chat(bad_words=["a" * 800_000] * 10),
        "bad_words_at_bound": chat(bad_words=[word] * BAD_WORDS),
        "repetition_1e9": chat(repetition_detection=repetition, **long_answer),
        "tokenize_250_kb": LARGE,
        "input_tokens_4000_items": Asked(INPUT_TOKENS, {"input": [ITEM] * 4_000}),
        "prompt_logprobs_at_bound": Asked(COMPLETIONS, {**of_prompt, "prompt_logprobs": TOP_LOGPROBS}),
        "echo_logprobs": Asked(COMPLETIONS, {**of_prompt, "echo": True, "logprobs": TOP_LOGPROBS}),
        "chat_top_logprobs": chat(logprobs=True, top_logprobs=TOP_LOGPROBS, **long_answer),
        "tools_400": chat(tools=[tool(number) for number in range(400)]),
    }


def tool(number: int) -> dict[str, Any]:
    """A function with two parameters."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    }
    described = {"name": f"tool_{number}", "description": "The weather.", "parameters": parameters}
    return {"type": "function", "function": described}


def encoded(asked: Asked, model: str) -> tuple[bytes, dict[str, str]]:
    """The body as it is sent, and the headers that say how: with gzip where it is large."""
    data = json.dumps({"model": model, **asked.body}, separators=(",", ":")).encode()
    if len(data) < GZIP_FROM_BYTES:
        return data, {}
    return gzip.compress(data), {"content-encoding": "gzip"}
