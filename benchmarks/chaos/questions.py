"""What is asked: a pool of requests of all kinds, drawn from a seed. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.common.workload import WORDS

MIN_WORDS, MAX_WORDS = 8, 120
STOP = " the"  # a word that the models say now and then


class Api(StrEnum):
    """The route under /v1."""

    CHAT = "chat/completions"
    COMPLETION = "completions"
    RESPONSES = "responses"


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the pool. `body` is what is sent to `api`."""

    number: int
    api: Api
    stream: bool
    prompt: str
    tokens: int
    body: dict[str, Any]


def questions(count: int, apis: tuple[Api, ...], tokens: tuple[int, int], model: str, seed: int) -> list[Question]:
    """A pool of greedy requests: of five, four are streamed; some have two choices, a stop string, or logprobs."""
    draw = random.Random(f"{seed} questions")
    found = []
    for number in range(count):
        api, stream = apis[number % len(apis)], draw.random() < 0.8
        prompt = " ".join([f"q{number}", *draw.choices(WORDS, k=draw.randint(MIN_WORDS, MAX_WORDS))])
        length = draw.randint(*tokens)
        found.append(Question(number, api, stream, prompt, length, _body(api, stream, prompt, length, model, draw)))
    return found


def _body(api: Api, stream: bool, prompt: str, tokens: int, model: str, draw: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "temperature": 0, "stream": stream}
    if api is Api.RESPONSES:
        return body | {"input": prompt, "max_output_tokens": tokens}
    body |= {"max_tokens": tokens, "ignore_eos": True}
    if stream:
        body["stream_options"] = {"include_usage": True}
    match draw.randrange(6):
        case 0:
            body["n"] = 2
        case 1:
            body["stop"] = STOP
        case 2:
            body |= {"logprobs": True, "top_logprobs": 1} if api is Api.CHAT else {"logprobs": 1}
    if api is Api.CHAT:
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}
