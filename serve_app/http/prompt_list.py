"""A completion with a list of prompts, embeddings of a list of inputs, or scores of a list of documents: one request of
the queue for each prompt or each few inputs or pairs, one answer to the client.

A prompt that is refused or loses its engine while others are streamed ends alone: the others go on to their ends, then
an event tells its error with its number (`prompt.1`). Before a byte has been sent, its error is the answer, as it is
that of a list that is not streamed. A refusal of the queue ends the list: each other prompt would wait in vain for as
long.

Granted together, the prompts of a list would need as many free slots on one replica at once, and idle them meanwhile;
2,000 inputs would hold a replica for as long as they all take. Queued together, they would fill the queue and wait for
each other. So one part waits at a time. The first is an arrival as any other; with its grant the list has begun, and a
full queue or a forecast refuses no later part of it.

Invariant: the merged answer has the choices, numbers and usage that one engine would give for the whole list, and an
error the path of its entry in that list; events of one prompt stay in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from serve_app.errors import BadRequest, EngineFailed, RequestFailed, ServeAppError
from serve_app.http.embed_answers import joined_answer
from serve_app.http.error_responses import JSON
from serve_app.http.python_calls import EVENT_END, error_in, error_of
from serve_app.http.response import HttpExchange, read_whole
from serve_app.http.split_body import SplitBody
from serve_app.transport import Frame, ResponseStream
from serve_app.types import Operation

_DATA = b"data: "
_DONE = b"[DONE]"
_RESULTS = "results"  # of a rerank
_ALONE = (BadRequest, RequestFailed, EngineFailed)  # say nothing about other prompts
_NUMBERED = ("data", _RESULTS)  # entries with an index, besides choices
_whole = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entries_of = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


class MergedExchange:
    """The answer to all prompts of a list.

    Args:
        exchange: the client's.
        split: the request, with the parts of its list.
    """

    def __init__(self, exchange: HttpExchange, split: SplitBody) -> None:
        self._exchange = exchange
        self.shares_query = split.shares_query
        self._operation = split.operation
        self._split_fields = split.fields
        self._top_n = _whole_number(split.body.get("top_n"))
        counts = [measure.answers for _, measure in split.parts]
        self._first = list(itertools.accumulate(counts, initial=0))  # number of each part's first choice
        self._documents: list[dict[str, Any]] = [{}] * len(counts)
        self._embed_documents = [b""] * len(counts)  # of Cohere's embeddings, which have a form of their own
        self._usage_event: dict[str, Any] | None = None
        self._has_begun = False
        self._created: int | None = None  # as the first event or document says
        self._sending = asyncio.Lock()  # the exchange takes one message at a time, and its head first
        self.is_streamed = False  # an event has been sent

    def begin(self) -> bool:
        """The answer to a prompt begins; whether it is the first of the list."""
        is_first, self._has_begun = not self._has_begun, True
        return is_first

    def in_list(self, number: int, error: ServeAppError) -> ServeAppError:
        """The error of one part, with the path of its entry in the client's list."""
        field, *rest = (error.param or "").split(".")
        if field in self._split_fields and self._operation is Operation.COMPLETION:
            path = ".".join([field, str(number), *rest])
        elif field in self._split_fields and rest and rest[0].isdecimal():
            path = ".".join([field, str(self._first[number] + int(rest[0])), *rest[1:]])
        else:
            return error
        message = error.message.replace(f"`{error.param}`", f"`{path}`")
        if message.startswith(f"{error.param}:"):
            message = path + message.removeprefix(error.param or "")
        error.param = path
        error.message = message
        return error

    def keep(self, number: int, document: bytes) -> None:
        """Keep the whole answer to one part: of embeddings, which may be many megabytes, without looking into them."""
        if self._operation is Operation.EMBED:
            self._embed_documents[number] = document
            return
        parts: dict[str, Any] = _whole.decode(document)
        for name, value in parts.items():
            parts[name] = _entries_of.decode(value) if name in _NUMBERED else msgspec.json.decode(value)
        for name in _NUMBERED:
            for entry in parts.get(name, ()):
                entry["index"] = msgspec.json.decode(entry["index"])
        self._documents[number] = self._renumbered(number, parts)

    async def send_events(self, number: int, events: bytes) -> None:
        """Send events of one prompt. Raises the error that one of them carries."""
        merged = list[bytes]()
        failure = None
        for event in filter(None, events.split(EVENT_END)):
            try:
                merged.append(self._merged(number, event))
            except ServeAppError as error:
                failure = error
                break
        if any(merged):
            async with self._sending:
                self.is_streamed = True
                await self._exchange.send_events(b"".join(merged))
        if failure is not None:
            raise failure

    async def end(self, failures: Sequence[ServeAppError] = ()) -> None:
        """End the answer: every prompt has its own, or failed while others were streamed. Raises the last failure."""
        if self.is_streamed:
            usage = b"" if self._usage_event is None else _event(self._usage_event)
            errors = b"".join([_event(error.body()) for error in failures[:-1]])
            if failures:
                await self._exchange.send_events(usage + errors)
                raise failures[-1]
            await self._exchange.send_events(usage + _DATA + _DONE + EVENT_END, is_last=True)
            return
        if self._operation is Operation.EMBED:
            await self._exchange.send_answer(200, JSON, joined_answer(self._embed_documents))
            return
        first, *others = self._documents
        entries = _name_of_entries(first)
        for other in others:
            first[entries] += other[entries]
            first["usage"] = _sum(first.get("usage"), other.get("usage"))
        if entries == _RESULTS:  # each part has its best first
            first[entries].sort(key=_relevance, reverse=True)
            first[entries] = first[entries][: self._top_n or None]
        await self._exchange.send_answer(200, JSON, msgspec.json.encode(first))

    def _merged(self, number: int, event: bytes) -> bytes:
        data = event.removeprefix(_DATA)
        if data == _DONE:
            return b""
        error = error_in(data)
        if error is not None:
            raise self.in_list(number, error)
        chunk = self._renumbered(number, msgspec.json.decode(data))
        if chunk["choices"]:
            return _event(chunk)
        before = None if self._usage_event is None else self._usage_event.get("usage")
        self._usage_event = {**chunk, "usage": _sum(before, chunk.get("usage"))}
        return b""

    def _renumbered(self, number: int, answer: dict[str, Any]) -> dict[str, Any]:
        if "id" in answer:
            answer["id"] = answer["id"].removesuffix(f"-{number}")
        if "created" in answer:
            if self._created is None:
                self._created = answer["created"]
            answer["created"] = self._created
        for choice in answer[_name_of_entries(answer)]:
            choice["index"] += self._first[number]
        return answer


class PromptExchange:
    """The answer to one part of a list, as a part of the merged one. `query_counted`: as in `Submit`."""

    def __init__(self, merged: MergedExchange, number: int) -> None:
        self.merged = merged
        self._number = number
        self.query_counted = number > 0 and merged.shares_query

    async def relay(self, stream: ResponseStream, frames: list[Frame]) -> Frame:
        """As `HttpExchange.relay`. Raises the engine's refusal of this prompt."""
        first = frames[0]
        if first.media == "json":
            body = await read_whole(stream, frames)
            if first.status >= 400:
                raise self.merged.in_list(self._number, error_of(first.status, [], body))
            self.merged.keep(self._number, body)
            return frames[-1]
        stream.client_has_seen = True
        while True:
            await self.merged.send_events(self._number, b"".join([frame.body for frame in frames]))
            if frames[-1].usage is not None:
                return frames[-1]
            frames = await stream.next()


class PromptTurns:
    """When the prompts of a list enter the queue, in their order.

    Args:
        at_once: how many may wait or run.
    """

    def __init__(self, at_once: int) -> None:
        self._places = asyncio.Semaphore(at_once)
        self._waits = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[Callable[[], None]]:
        """A prompt, from its arrival in the queue to its end. Call what this yields at its grant: the next one may
        arrive then. Idempotent."""
        async with self._places:
            await self._waits.acquire()
            with contextlib.ExitStack() as waits:
                waits.callback(self._waits.release)
                yield waits.close


async def run_together(tasks: Sequence[asyncio.Task[None]], merged: MergedExchange) -> list[ServeAppError]:
    """Wait for all tasks. Returns the failures, in the order of the tasks, that did not end the others: those of single
    prompts while others are streamed. Raises the first other one."""
    pending = set(tasks)
    failures = dict[asyncio.Task[None], ServeAppError]()
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                try:
                    task.result()
                except _ALONE as error:
                    if not merged.is_streamed:
                        raise
                    failures[task] = error
        return [failures[task] for task in tasks if task in failures]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _name_of_entries(answer: Mapping[str, Any]) -> str:
    return next((name for name in _NUMBERED if name in answer), "choices")


def _relevance(result: Mapping[str, Any]) -> float:
    return float(msgspec.json.decode(result["relevance_score"]))


def _whole_number(given: Any) -> int:
    try:
        return int(given)
    except (TypeError, ValueError, OverflowError):
        return 0  # every engine refuses it


def _event(chunk: Mapping[str, Any]) -> bytes:
    return _DATA + msgspec.json.encode(chunk) + EVENT_END


def _sum(left: Any, right: Any) -> Any:
    """The sum of two counts, or of each count in two usages."""
    if left is None or right is None:
        return right if left is None else left
    if isinstance(left, dict):
        return {name: _sum(left.get(name), right.get(name)) for name in left | right}
    return left + right
