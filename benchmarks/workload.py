"""What is asked of a server under measurement: one run's specification, its prompts, a request's bytes on the wire."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

MIN_PROMPT_WORDS, MAX_PROMPT_WORDS = 45, 180  # about 60 to 200 tokens: a common word is one token, the number 15
WORD_TEXT = """
the of and to in that was for with as his on be at by had not are but from have they which one you were all her she
river mountain bridge window letter winter music number engine router request memory answer question machine learning
describe explain compare translate table column weather city night morning children government water something
"""
WORDS = WORD_TEXT.split()


@dataclass(frozen=True, slots=True)
class Spec:
    """One run. `seed` fixes the prompts: the same seed sends the same prompts in the same order of requests."""

    host: str
    port: int
    api_key: str
    model: str
    clients: int
    max_tokens: int
    warmup_s: float
    window_s: float
    max_requests: int
    seed: int


def prompts(seed: int) -> Iterator[str]:
    """Endless seeded prompts, each opening with a number of its own: no two share a prefix worth caching."""
    rng = random.Random(seed)
    while True:
        words = rng.choices(WORDS, k=rng.randint(MIN_PROMPT_WORDS, MAX_PROMPT_WORDS))
        yield f"{rng.getrandbits(64):016x} {' '.join(words)}"


def request_bytes(spec: Spec, prompt: str) -> bytes:
    """One streaming chat completion as HTTP/1.1 on the wire."""
    body = json.dumps(
        {
            "model": spec.model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": spec.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
        separators=(",", ":"),
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {spec.host}:{spec.port}\r\n"
        f"authorization: Bearer {spec.api_key}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def write_spec(spec: Any) -> str:
    """What the generator reads from its standard input: any dataclass."""
    return json.dumps(asdict(spec))
