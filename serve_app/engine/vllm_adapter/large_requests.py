"""The engine's side of `render_process`: which requests it reads, one after the other, tenants in turn."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable

import msgspec
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from serve_app.core.body_bounds import is_large
from serve_app.engine.helper_queue import HelperQueue
from serve_app.engine.vllm_adapter.rendered import Rendered
from serve_app.transport import Submit
from serve_app.types import Operation

READ_THERE = frozenset(Operation) - {
    Operation.EMBEDDING,
    Operation.SCORE,
    Operation.RERANK,
    Operation.TOKENIZER_INFO,
}

Read = Rendered | ErrorResponse | bytes | None


class LargeRequests:
    """Has large requests read and rendered by a helper, which starts with the first of them: it takes 0.7 GiB.

    Args:
        start: starts it; returns what sends it a `Submit` in MessagePack, and returns its pickled answer. Both block.
    """

    def __init__(self, start: Callable[[], Callable[[bytes], bytes]]) -> None:
        self._start = start
        self._ask: Callable[[bytes], bytes] | None = None
        self._queue = HelperQueue(self._read)

    async def read(self, submit: Submit) -> Read:
        """The request as the helper has read it (`render_process`); None: it is to be read here. Raises Unavailable:
        the helper does not answer, or has ended."""
        if submit.operation not in READ_THERE or not is_large(submit.operation, submit.body):
            return None
        return await self._queue.ask(submit.cache_salt or "", submit)

    async def _read(self, submit: Submit) -> Read:
        def ask() -> Read:
            if self._ask is None:
                self._ask = self._start()
            answer: Read = pickle.loads(self._ask(msgspec.msgpack.encode(submit)))
            return answer

        return await asyncio.to_thread(ask)
