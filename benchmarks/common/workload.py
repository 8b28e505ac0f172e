"""What is asked of a server under measurement: one run's specification, its prompts, a request's bytes on the wire."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

# about 60 to 200 tokens: a common word is one token, the number 15
MIN_PROMPT_WORDS = 45
MAX_PROMPT_WORDS = 180
WORD_TEXT = """
the of and to in that was for with as his on be at by had not are but from have they which one you were all her she
river mountain bridge window letter winter music number engine router request memory answer question machine learning
describe explain compare translate table column weather city night morning children government water something
"""
WORDS = WORD_TEXT.split()
CHAT_PATH = "/v1/chat/completions"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


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


def post(where: str, path: str, api_key: str, body: Mapping[str, Any] | bytes, /, **headers: str) -> bytes:
    """A request as HTTP/1.1 on the wire; `where` is host and port. Without a key it has no authorization."""
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    fields = {
        "host": where,
        **({"authorization": f"Bearer {api_key}"} if api_key else {}),
        "content-type": "application/json",
        "content-length": str(len(data)),
        **headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + data


def chat(model: str, prompt: str, max_tokens: int, *, stream: bool = True) -> dict[str, Any]:
    """A chat completion of exactly so many tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    return body | {"temperature": 0, "ignore_eos": True} | (STREAMED if stream else {})


def request_bytes(spec: Spec, prompt: str) -> bytes:
    """One streaming chat completion as HTTP/1.1 on the wire."""
    body = chat(spec.model, prompt, spec.max_tokens)
    return post(f"{spec.host}:{spec.port}", CHAT_PATH, spec.api_key, body)


def write_spec(spec: Any) -> str:
    """What the generator reads from its standard input: any dataclass."""
    return json.dumps(asdict(spec))
