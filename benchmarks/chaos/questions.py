"""What is asked: a pool of requests of all kinds, drawn from a seed. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.common.workload import WORDS

MIN_WORDS = 8
MAX_WORDS = 120
STOP = " the"  # a word that the models say now and then


class Api(StrEnum):
    """The route under /v1."""

    CHAT = "chat/completions"
    COMPLETION = "completions"
    RESPONSES = "responses"


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the pool: `body` is what is sent to `api`. Of each prompt one answer, of at most `tokens`."""

    number: int
    api: Api
    stream: bool
    prompts: tuple[str, ...]
    tokens: int
    body: dict[str, Any]


def questions(count: int, apis: tuple[Api, ...], tokens: tuple[int, int], model: str, seed: int) -> list[Question]:
    """A pool of greedy requests: of five, four are streamed; some have two prompts, a stop string, or logprobs."""
    draw = random.Random(f"{seed} questions")
    found = []
    for number in range(count):
        api = apis[number % len(apis)]
        stream = draw.random() < 0.8
        count = 2 if api is Api.COMPLETION and draw.random() < 0.2 else 1
        words = (draw.choices(WORDS, k=draw.randint(MIN_WORDS, MAX_WORDS)) for _ in range(count))
        prompts = tuple(" ".join([f"q{number}", *some]) for some in words)
        length = draw.randint(*tokens)
        body = {"model": model, "temperature": 0, "stream": stream} | _fields(api, stream, prompts, length, draw)
        found.append(Question(number, api, stream, prompts, length, body))
    return found


def _fields(api: Api, stream: bool, prompts: tuple[str, ...], tokens: int, draw: random.Random) -> dict[str, Any]:
    """What the body has beside what all have."""
    if api is Api.RESPONSES:
        return {"input": prompts[0], "max_output_tokens": tokens, "ignore_eos": True}
    body: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    if stream:
        body["stream_options"] = {"include_usage": True}
    match draw.randrange(5):
        case 0:
            body["stop"] = STOP
        case 1:
            body |= {"logprobs": True, "top_logprobs": 1} if api is Api.CHAT else {"logprobs": 1}
    if api is Api.CHAT:
        return body | {"messages": [{"role": "user", "content": prompts[0]}]}
    return body | {"prompt": prompts[0] if len(prompts) == 1 else list(prompts)}
