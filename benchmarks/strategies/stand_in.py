"""Stands for `serve_app.engine.batched_engine` until it is merged; the same signature."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any

from serve_app.core.batching import Batcher, BatchItem, BatchPolicy, RequestBatch
from serve_app.transport import EngineBackend, Frame, Submit


class BatchedEngine:
    def __init__(self, backend: EngineBackend, policy: BatchPolicy | None, clock: Callable[[], float]) -> None:
        self._backend, self._clock = backend, clock
        self._batcher: Batcher | None = None if policy is None else Batcher(policy)
        self._waiting: dict[str, asyncio.Event] = {}
        self._ids = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def set_policy(self, policy: BatchPolicy | None) -> None:
        old, self._batcher = self._batcher, None if policy is None else Batcher(policy)
        if old is not None:
            self._start(old, old.close(self._clock()))

    def _start(self, batcher: Batcher, batches: list[RequestBatch]) -> None:
        for batch in batches:
            for item in batch.items:
                self._waiting.pop(item.item_id).set()
        due = batcher.next_due()
        if due is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, due - self._clock()), self._tick, batcher)

    def _tick(self, batcher: Batcher) -> None:
        self._start(batcher, batcher.on_tick(self._clock()))

    async def run(self, submit: Submit) -> AsyncGenerator[Frame, None]:
        batcher = self._batcher
        if batcher is None:
            async with contextlib.aclosing(self._backend.run(submit)) as frames:
                async for frame in frames:
                    yield frame
            return
        if batcher.is_queue_full:
            yield Frame(submit.number, b"{}", 503)
            return
        item = BatchItem(str(next(self._ids)), submit.prompt_tokens, submit.output_tokens)
        started = self._waiting[item.item_id] = asyncio.Event()
        try:
            self._start(batcher, batcher.on_arrive(item, self._clock()))
            await started.wait()
            async with contextlib.aclosing(self._backend.run(submit)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            self._waiting.pop(item.item_id, None)
            self._start(batcher, batcher.on_end(item.item_id, self._clock()))
