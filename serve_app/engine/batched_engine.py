"""Any engine behind `core.batching`: a request waits until its batch starts, and then runs as it would without.

Decides nothing itself: `Batcher` forms the batches, and this shell has the clock, the timer and the futures on which
the requests wait. A replica has one once its model has had `batching`; others give requests to their engine.

Invariant: each request that came to the batcher leaves it when its iterator ends, in whatever way; at most one batch
runs at a time, also across a change of the policy, unless the policy is continuous.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

import msgspec

from serve_app.core.batching import Batcher, BatchItem, BatchPolicy, RequestBatch
from serve_app.core.body_bounds import BYTES_PER_TOKEN
from serve_app.engine.batch_figures import BatchFigures, OpenBatch
from serve_app.errors import EngineFailed, EngineUnreachable, Overloaded
from serve_app.transport import EngineBackend, Frame, Submit, TokenUsage


@dataclass(slots=True, eq=False)
class _BatchedRequest:
    """A request that waits for its batch, or runs in it."""

    item: BatchItem
    started: asyncio.Future[None]
    batch: OpenBatch | None = None
    tokens: int = 0  # prompt and output, once it has ended with a whole answer


class BatchedEngine:
    """Forms batches in front of an engine. Not thread-safe: one event loop.

    Args:
        engine: runs the requests.
        policy: None: every request goes to the engine.
        clock: seconds, monotonic, at the pace of the event loop's own.
        figures: of the batches.
    """

    def __init__(
        self,
        engine: EngineBackend,
        policy: BatchPolicy | None,
        clock: Callable[[], float],
        figures: BatchFigures,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._figures = figures
        self._policy = policy
        self._batcher = None if policy is None else Batcher(policy)
        self._requests: dict[str, _BatchedRequest] = {}  # those in the batcher
        self._held: dict[str, _BatchedRequest] = {}  # arrived since a change of the policy whose last batches still run
        self._is_changing = False  # whether the batcher is of a former policy
        self._refusal = ""  # why requests that come from now on do not run; empty: they do
        self._ids = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def run(self, submit: Submit) -> AsyncGenerator[Frame, None]:
        """See `EngineBackend.run`. The request arrives when its first frame is asked for; while it waits, closing the
        iterator removes it from the batcher. Work that takes no slot never waits.

        Raises:
            EngineUnreachable: the engine died, drains or ends, and the request had not started.
        """
        if self._policy is None or not submit.operation.takes_slot:
            return self._engine.run(submit)
        return self._run_batched(submit)

    async def _run_batched(self, submit: Submit) -> AsyncGenerator[Frame, None]:
        if self._refusal:
            raise EngineUnreachable(self._refusal)
        if self._is_queue_full and not submit.accepted:
            full = f"{self.waiting} of {self._max_queued} requests wait"
            refused = Overloaded(f"the queue for batches of this engine replica is full: {full}")
            body = msgspec.json.encode(refused.body())
            yield Frame(submit.number, body, refused.status, "json", events=1, usage=TokenUsage())
            return
        request = self._arrive(submit)
        try:
            if request.started.done():
                await asyncio.sleep(0)  # it has filled the batch: after the requests before it
            await request.started
            async with contextlib.aclosing(self._engine.run(submit)) as frames:
                async for frame in frames:
                    if frame.usage is not None:
                        request.tokens = frame.usage.prompt_tokens + frame.usage.completion_tokens
                    yield frame
        except EngineFailed:
            if not self._engine.alive:
                self.fail()
            raise
        finally:
            self._end(request)

    def set_policy(self, policy: BatchPolicy | None) -> None:
        """Form the batches of requests that come from now on by another policy. Those that wait start without waiting
        for more, in batches of the former policy; later ones follow when these have ended (None: at once)."""
        if policy == self._policy:
            return
        self._policy = policy
        self._figures.forget_batches()
        if self._batcher is not None:
            self._is_changing = True
            self._begin(self._batcher.close(self._clock()))
        self._advance()

    def close(self) -> None:
        """The engine drains: what waits starts, in batches, and no request is accepted any more (but for the work that
        never waits, and without a policy)."""
        self._refusal = self._refusal or "this engine replica drains"
        if self._batcher is not None:
            self._begin(self._batcher.close(self._clock()))
            self._advance()

    def fail(self, message: str = "the engine ended before the request started") -> None:
        """The engine has failed for good, or ends: requests that wait and that come end with `EngineUnreachable`. It
        never got them, so that they may run elsewhere."""
        self._refusal = message
        for request in [*self._requests.values(), *self._held.values()]:
            if not request.started.done():
                request.started.set_exception(EngineUnreachable(message))

    @property
    def waiting(self) -> int:
        """Requests that wait for their batch."""
        return len(self._held) + (0 if self._batcher is None else self._batcher.waiting)

    @property
    def forms_batches(self) -> bool:
        """Whether requests wait for others; else the engine's steps are the batches."""
        return self._policy is not None and not self._policy.is_continuous

    # Inside

    @property
    def _max_queued(self) -> int | None:
        return None if self._policy is None else self._policy.max_queued

    @property
    def _is_queue_full(self) -> bool:
        if self._batcher is None or self._is_changing:
            return self._max_queued is not None and len(self._held) >= self._max_queued
        return self._batcher.is_queue_full

    def _arrive(self, submit: Submit) -> _BatchedRequest:
        item = batch_item(str(next(self._ids)), submit)
        request = _BatchedRequest(item, asyncio.get_running_loop().create_future())
        self._held[item.item_id] = request
        self._advance()
        return request

    def _end(self, request: _BatchedRequest) -> None:
        """A request has ended, or is cancelled; it waited, or it ran."""
        item_id = request.item.item_id
        self._held.pop(item_id, None)
        if self._requests.pop(item_id, None) is None or self._batcher is None:
            return
        if request.batch is not None:
            self._figures.end_request(request.batch, request.tokens)
        self._begin(self._batcher.on_end(item_id, self._clock()))
        self._advance()

    def _advance(self) -> None:
        """Complete a change of the policy once the former batches have ended, hand in what is held, set the timer."""
        if self._is_changing and not self._requests:
            self._is_changing = False
            self._batcher = None
        if not self._is_changing or self._policy is None:
            self._hand_in()
        self._set_timer()

    def _hand_in(self) -> None:
        """Give the requests held to the batcher of the present policy."""
        if self._policy is None:
            for request in self._held.values():
                _wake(request)
            self._held.clear()
            return
        if self._batcher is None:
            self._batcher = Batcher(self._policy)
        now = self._clock()
        held, self._held = self._held, {}
        for item_id, request in held.items():
            self._requests[item_id] = request
            self._begin(self._batcher.on_arrive(request.item, now))
        if self._refusal:
            self._begin(self._batcher.close(now))

    def _begin(self, batches: Iterable[RequestBatch]) -> None:
        """Wake the requests of these batches; their tasks run in order in the next turn of the event loop."""
        for batch in batches:
            opened = self._figures.start_batch(batch)
            for item in batch.items:
                request = self._requests[item.item_id]
                request.batch = opened
                _wake(request)

    def _set_timer(self) -> None:
        due = None if self._batcher is None else self._batcher.next_due()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._clock()), self._tick)

    def _tick(self) -> None:
        if self._batcher is not None:
            self._begin(self._batcher.on_tick(self._clock()))
        self._set_timer()


def _wake(request: _BatchedRequest) -> None:
    if not request.started.done():
        request.started.set_result(None)


def batch_item(item_id: str, submit: Submit) -> BatchItem:
    """The request for the batcher; its router's estimate, or a quarter of the bytes of its body."""
    prompt_tokens = submit.prompt_tokens or len(msgspec.json.encode(submit.body)) // BYTES_PER_TOKEN
    return BatchItem(item_id, int(max(1, prompt_tokens)), submit.output_tokens)
