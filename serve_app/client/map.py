"""One call for each of many prompts: some at a time, in order or as completed, each with its own error.

`map_plan` decides what is read, sent, tried again and yielded; here are the tasks, the items and the results.

Invariant: an item's error is its result, and ends nothing else. An error of the source comes after the results of all
items before it. However a map ends or is left, its requests are aborted and its source is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from serve_app.client.loop_bridge import LoopBridge
from serve_app.client.map_plan import MapPlan, repeat_of
from serve_app.client.map_progress import BarReporter, MapProgress, Report
from serve_app.client.map_source import END, ReaderSource, Source, check, source_of
from serve_app.client.options import MapItem
from serve_app.client.streams import Stream, SyncStream
from serve_app.errors import DROPPED, BadRequest, ServeAppError, Unavailable
from serve_app.http import CallKind, make_request, require_known

CONCURRENCY = 32  # requests in flight: fills the batch of one engine; the others of its slots are for people
PRIORITY = "low"  # a batch gives way to whoever waits for an answer
PATIENCE_S = 3600.0  # an item may be refused so long: a restart, a busy hour; a server gone for longer stays away
WARN_S = 60.0  # between two log lines about refusals of one map

Prompts: TypeAlias = Iterable[MapItem] | AsyncIterable[MapItem]
Answer: TypeAlias = ChatCompletion | Completion | CreateEmbeddingResponse
# Sends an item's request, the same each time; its argument counts the attempts before.
Ask: TypeAlias = Callable[[int], Awaitable[Answer]]
# Makes the request of a call: its kind, the prompt, messages or input, and the other fields.
Prepare: TypeAlias = Callable[[CallKind, Any, Mapping[str, Any]], Awaitable[Ask]]

KIND_OF_FIELD = {"messages": CallKind.CHAT, "prompt": CallKind.COMPLETE, "input": CallKind.EMBED}

logger = logging.getLogger("serve_app")


@dataclass(frozen=True, slots=True)
class MapResult:
    """What came of one item.

    Args:
        index: its place in the source, from 0.
        item: as the source gave it.
        answer: of the type that `chat`, `complete` or `embed` returns; None: it failed.
        error: why; None: it has an answer.
        attempts: how often it was sent; 0: it was not, because it is no request.
    """

    index: int
    item: Any
    answer: Answer | None
    error: ServeAppError | None
    attempts: int

    def unwrap(self) -> Answer:
        """The answer. Raises the error, if there is one."""
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer

    @property
    def text(self) -> str:
        """The text of the answer's first choice, empty if it has none. Raises the error, if there is one.

        Raises:
            TypeError: embeddings have no text.
        """
        answer = self.unwrap()
        if isinstance(answer, CreateEmbeddingResponse):
            raise TypeError("embeddings have no text: read `answer`")
        if isinstance(answer, Completion):
            return answer.choices[0].text
        return answer.choices[0].message.content or ""


@dataclass(frozen=True, slots=True)
class MapOptions:
    """The arguments of a map. `fields` are of each call, unless its item has its own.

    Raises:
        ValueError: a bound that nothing can keep. BadRequest: as of a call with these fields.
    """

    concurrency: int
    ordered: bool
    patience_s: float
    fields: Mapping[str, Any]

    def __post_init__(self) -> None:
        if type(self.concurrency) is not int or self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency!r}; at least one request has to run")
        if not self.patience_s >= 0:
            raise ValueError(f"patience_s is {self.patience_s!r}; it cannot be negative")
        require_known("map", self.fields)
        for name in ("idempotency_key", *KIND_OF_FIELD):
            if name in self.fields:
                raise BadRequest(f"`{name}` belongs to one item: give it in a mapping, as an item", param=name)
        make_request(CallKind.COMPLETE, {"prompt": "", **self.fields})


def call_of(item: Any, fields: Mapping[str, Any]) -> tuple[CallKind, Any, Mapping[str, Any]]:
    """The call that an item asks for: its kind, its prompt, messages or input, and its other fields.

    A text, token ids, or a list of texts is a completion; a list of messages is a chat; a mapping says by `messages`,
    `prompt` or `input` what it is, and its other fields override `fields`.

    Raises:
        BadRequest: it is none of these.
    """
    if isinstance(item, Mapping):
        named = [name for name in KIND_OF_FIELD if name in item]
        if len(named) != 1:
            has = "none of them" if not named else " and ".join(f"`{name}`" for name in named)
            raise BadRequest(
                f"an item that is a mapping has one of `messages`, `prompt` and `input`; this has {has} "
                "(a list of messages is one item)",
                param=named[1] if named else None,
            )
        own = {name: value for name, value in item.items() if name != named[0]}
        return KIND_OF_FIELD[named[0]], item[named[0]], {**fields, **own}
    if isinstance(item, str):
        return CallKind.COMPLETE, item, fields
    if isinstance(item, Sequence) and not isinstance(item, bytes | bytearray) and len(item):
        is_prompt = isinstance(item[0], str | int | Sequence)
        return CallKind.COMPLETE if is_prompt else CallKind.CHAT, item, fields
    raise BadRequest(
        f"an item is a text, token ids, a list of messages or a mapping, and not {_shown(item)}", param="prompts"
    )


def results_of(
    prepare: Prepare, prompts: Prompts, options: MapOptions, progress: bool | Report | None
) -> Stream[MapResult]:
    """The results of a map in the caller's event loop; the first read begins it. Raises TypeError: as `check`."""
    total = check(prompts)
    leaving = contextlib.ExitStack()
    report = _report_of(progress, leaving)
    return Stream(_run(prepare, lambda: source_of(prompts), options, report, leaving, total))


def sync_results_of(
    prepare: Prepare, bridge: LoopBridge, prompts: Prompts, options: MapOptions, progress: bool | Report | None
) -> SyncStream[MapResult]:
    """The same without `await`: the requests run in the home loop; the thread that reads the results also reads the
    prompts and reports the progress, whenever it waits for a result.

    Raises:
        TypeError: as `check`, or `prompts` is an async iterable.
    """
    total = check(prompts)
    if isinstance(prompts, AsyncIterable):
        raise TypeError("an async iterable of prompts needs `async for result in llm.map(...)`")
    messages: SimpleQueue[Any] = SimpleQueue()
    source = ReaderSource(prompts, messages.put)
    leaving = contextlib.ExitStack()
    report = _report_of(progress, leaving)
    leaving.callback(source.close_in_reader)
    forwarded = None if report is None else lambda figures: messages.put(partial(report, figures))
    results = _run(prepare, lambda: source, options, forwarded, contextlib.ExitStack(), total)
    return SyncStream(bridge, results, messages=messages, max_unread=1, on_close=leaving.close)


async def _run(
    prepare: Prepare,
    begin: Callable[[], Source],
    options: MapOptions,
    report: Report | None,
    leaving: contextlib.ExitStack,
    total: int | None,
) -> AsyncGenerator[MapResult, None]:
    """A map that nobody reads touches neither its prompts nor the terminal. `leaving`: closed after its end."""
    with leaving:
        async with contextlib.aclosing(MapRun(prepare, begin(), options, report, total).results()) as results:
            async for result in results:
                yield result


def _report_of(progress: bool | Report | None, leaving: contextlib.ExitStack) -> Report | None:
    """Where the progress goes; `leaving` closes a bar."""
    if callable(progress):
        return progress
    if not progress:
        return None
    bar = BarReporter()
    leaving.callback(bar.close)
    return bar


@dataclass(slots=True, eq=False)
class _Item:
    """An item that was read and not yielded yet."""

    item: Any
    attempts: int = 0
    ask: Ask | None = None  # once its request is made
    result: MapResult | None = None


class MapRun:
    """A map in one event loop; `results` runs it.

    Args:
        prepare: makes the request of an item.
        source: the items; closed at the end.
        total: their number, if known.
    """

    def __init__(
        self, prepare: Prepare, source: Source, options: MapOptions, report: Report | None, total: int | None
    ) -> None:
        self._prepare = prepare
        self._source = source
        self._fields = options.fields
        self._report_progress = report
        self._total = total
        self._plan = MapPlan(options.concurrency, ordered=options.ordered, patience_s=options.patience_s)
        self._items: dict[int, _Item] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_reading = False
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()  # a result may be there
        self._source_error: BaseException | None = None  # raised after the results of the items before
        self._fault: BaseException | None = None  # raised at once: of the caller's function, or of this module
        self._failed = self._done = self._tokens = 0
        self._warned_at: float | None = None
        self._is_closed = False

    async def results(self) -> AsyncGenerator[MapResult, None]:
        """Run the map. The requests go on while the reader is busy with a result."""
        try:
            self._advance()
            while (result := await self._next()) is not None:
                yield result
        finally:
            await self._close()

    async def _next(self) -> MapResult | None:
        """The next result; None after the last one."""
        while True:
            if self._fault is not None:
                raise self._fault
            index = self._plan.take()
            if index is not None:
                self._advance()
                return self._items.pop(index).result
            if self._plan.is_over:
                if self._source_error is not None:
                    raise self._source_error
                return None
            self._changed.clear()
            await self._changed.wait()

    def _advance(self) -> None:
        """Start what the plan wants started, after each event."""
        loop = asyncio.get_running_loop()
        for index in self._plan.to_send(loop.time()):
            self._start(self._attempt(index), partial(self._on_attempt, index))
        if self._plan.wants_item and not self._is_reading:
            self._is_reading = True
            self._start(self._source.read(), self._on_read)
        if self._timer is not None:
            self._timer.cancel()
        moment = self._plan.next_moment
        self._timer = None if moment is None else loop.call_at(moment, self._advance)
        self._changed.set()

    def _start(self, work: Any, on_end: Callable[[asyncio.Task[Any]], None]) -> None:
        def ended(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if self._is_closed:
                return
            try:
                if task.cancelled():  # not by this map: the loop of the client's calls has ended
                    raise Unavailable("the call was dropped", code=DROPPED)
                on_end(task)
            except BaseException as error:  # noqa: BLE001 - raised where the results are read
                self._fault = self._fault or error
                self._changed.set()
            else:
                self._advance()

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def _attempt(self, index: int) -> Answer | ServeAppError:
        item = self._items[index]
        try:
            if item.ask is None:
                item.ask = await self._prepare(*call_of(item.item, self._fields))
            item.attempts += 1
            return await item.ask(item.attempts - 1)
        except ServeAppError as error:
            return error

    def _on_read(self, reading: asyncio.Task[Any]) -> None:
        self._is_reading = False
        error = reading.exception()
        if error is not None or reading.result() is END:
            self._source_error = error
            self._plan.has_source_ended = True
        else:
            self._items[self._plan.on_item()] = _Item(reading.result())

    def _on_attempt(self, index: int, attempt: asyncio.Task[Answer | ServeAppError]) -> None:
        outcome = attempt.result()
        item = self._items[index]
        if not isinstance(outcome, ServeAppError):
            self._plan.on_ended(index, answered=True)
            self._tokens += _tokens_of(outcome)
            item.result = MapResult(index, item.item, outcome, None, item.attempts)
        else:
            repeat = repeat_of(outcome)
            now = attempt.get_loop().time()
            if repeat is not None and self._plan.on_refused(index, repeat, now):
                self._warn(outcome, now)
                self._report()
                return
            if repeat is None:
                self._plan.on_ended(index, answered=False)
            self._failed += 1
            item.result = MapResult(index, item.item, None, outcome, item.attempts)
        self._done += 1
        item.ask = None  # the request's bytes
        self._report()

    def _report(self) -> None:
        if self._report_progress is not None:
            plan = self._plan
            self._report_progress(
                MapProgress(self._done, self._failed, plan.in_flight, plan.waiting, self._tokens, self._total)
            )

    def _warn(self, error: ServeAppError, now: float) -> None:
        """Say why a map stands still."""
        if self._warned_at is None or now - self._warned_at >= WARN_S:
            self._warned_at = now
            logger.warning("Map has %d refused items, which wait and are sent again: %s", self._plan.waiting, error)

    async def _close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._source.close()


def _tokens_of(answer: Answer) -> int:
    if isinstance(answer, CreateEmbeddingResponse):
        return answer.usage.total_tokens
    return 0 if answer.usage is None else answer.usage.completion_tokens


def _shown(item: Any) -> str:
    return "an empty list" if isinstance(item, Sequence) else f"a {type(item).__name__}"
