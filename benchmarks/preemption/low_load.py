"""Clients of class `low` that keep every slot busy, each a tenant of its own, and the answers they get.

Invariant: no client asks the same twice in one tenant's cache, so no answer is found there; whether an answer is right
is judged by the text, the finish reason and the count of tokens of an undisturbed one.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common.scaling_stack import MODEL
from benchmarks.common.sse import AnswerReader, SseSplitter
from benchmarks.common.workload import STREAMED, post

LOW = "low"
WHOLE_SHARE = 0.25  # of the answers: not streamed
PROMPT_WORDS = 6
READ_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Question:
    """One request of class `low`."""

    prompt: str
    tokens: int
    is_stream: bool

    def body(self) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": self.prompt, "max_tokens": self.tokens, "ignore_eos": True, "temperature": 0}
        return body | {"priority": LOW} | (STREAMED if self.is_stream else {})


@dataclass(frozen=True, slots=True)
class Completion:
    """What an answer says; streamed or not, it is the same."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class LowAnswer:
    """The answer to the question of this number; why there is none, or nothing."""

    question: int
    request_id: str
    completion: Completion | None
    failure: str = ""


def questions_of(count: int, tokens: tuple[int, int], seed: int) -> list[Question]:
    """Questions with texts of their own, from the least to the most output tokens, a part of them not streamed."""
    draw = random.Random(f"{seed} low")
    found = list[Question]()
    for number in range(count):
        words = (f"w{draw.randrange(10**6):06d}" for _ in range(PROMPT_WORDS - 1))
        is_stream = draw.random() >= WHOLE_SHARE
        found.append(Question(" ".join((f"q{number}", *words)), draw.randint(*tokens), is_stream))
    return found


def completion_of(body: bytes, *, is_stream: bool) -> Completion:
    """Read a whole answer, or all events of a stream.

    Raises:
        ValueError: a stream without its end, an error event, or no completion.
    """
    splitter = SseSplitter()
    events = [body]
    if is_stream:
        events = [event.removeprefix(b"data: ") for event in splitter.feed(body) if not event.startswith(b":")]
        if not events or events.pop() != b"[DONE]" or splitter.pending:
            raise ValueError(f"the stream has no end: {body[-200:]!r}")
    text = ""
    finish_reason = None
    usage = dict[str, int]()
    try:
        for event in events:
            part = json.loads(event)
            for choice in part["choices"]:
                text += choice["text"]
                finish_reason = choice["finish_reason"] or finish_reason
            usage = part.get("usage") or usage
        return Completion(text, finish_reason, usage["prompt_tokens"], usage["completion_tokens"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no completion: {error!r}: {body[-200:]!r}") from None


async def fetch(url: str, key: str, question: Question, request_id: str) -> bytes:
    """The bytes of one response, from a connection of its own. Raises OSError."""
    where = urlsplit(url)
    headers = {"x-request-id": request_id, "connection": "close"}
    pieces = list[bytes]()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(post(where.netloc, "/v1/completions", key, question.body(), **headers))
        while piece := await reader.read(READ_BYTES):
            pieces.append(piece)
    finally:
        writer.close()
    return b"".join(pieces)


def answer_of(number: int, request_id: str, response: bytes, question: Question) -> LowAnswer:
    """Read a response."""
    try:
        answer = AnswerReader(time.monotonic, streamed=False)
        answer.feed(response)
        if not answer.complete or answer.status != 200:
            return LowAnswer(number, request_id, None, f"{answer.status} {answer.body[:200]!r}")
        return LowAnswer(number, request_id, completion_of(answer.body, is_stream=question.is_stream))
    except (OSError, ValueError) as error:
        return LowAnswer(number, request_id, None, repr(error))


async def undisturbed(url: str, key: str, questions: Sequence[Question], at_once: int) -> dict[int, Completion]:
    """The answers to all questions while nothing else runs, by number.

    Raises:
        OSError, ValueError: one has failed.
    """
    found = dict[int, Completion]()
    turn = iter(enumerate(questions))

    async def client(name: int) -> None:
        for number, question in turn:
            request_id = f"undisturbed-{name}-{number}"
            answer = answer_of(number, request_id, await fetch(url, key, question, request_id), question)
            if answer.completion is None:
                raise ValueError(f"an undisturbed answer failed: {answer.failure}")
            found[number] = answer.completion

    async with asyncio.TaskGroup() as tasks:
        for name in range(at_once):
            tasks.create_task(client(name))
    return found


class LowClients:
    """Clients that ask again as soon as they have an answer, each from another place in the questions on."""

    def __init__(self, url: str, keys: Sequence[str], questions: Sequence[Question], name: str) -> None:
        self._url = url
        self._keys = keys
        self._questions = questions
        self._name = name
        self._places = [number * len(questions) // len(keys) for number in range(len(keys))]  # survive `stop`
        self._asked = [0] * len(keys)
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._responses: list[tuple[int, str, bytes]] = []

    def start(self) -> None:
        self._is_stopping = False
        self._responses = []
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(len(self._keys))]

    async def stop(self) -> list[LowAnswer]:
        """Let each end its present request; the answers since `start`, read only now: that would delay the clients
        that are measured."""
        self._is_stopping = True
        await asyncio.gather(*self._tasks)
        return [answer_of(number, name, body, self._questions[number]) for number, name, body in self._responses]

    async def _client(self, client: int) -> None:
        while not self._is_stopping:
            if self._asked[client] == len(self._questions):
                raise ValueError("a client has asked all questions: more are needed")
            number = (self._places[client] + self._asked[client]) % len(self._questions)
            self._asked[client] += 1
            request_id = f"{self._name}-{client}-{self._asked[client]}"
            try:
                response = await fetch(self._url, self._keys[client], self._questions[number], request_id)
            except OSError as error:
                response = repr(error).encode()
            self._responses.append((number, request_id, response))


def wrong(answers: Sequence[LowAnswer], right: Mapping[int, Completion]) -> list[LowAnswer]:
    """The answers that differ from the undisturbed ones, and those that failed."""
    return [answer for answer in answers if answer.completion != right[answer.question]]
