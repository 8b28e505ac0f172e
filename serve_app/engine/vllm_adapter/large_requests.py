"""The engine's side of `render_process`: which requests it reads, one after the other, tenants in turn."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable

import msgspec
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from serve_app.core.body_bounds import body_size, is_large
from serve_app.engine.helper_queue import HelperQueue
from serve_app.engine.vllm_adapter.rendered import Rendered
from serve_app.errors import BadRequest
from serve_app.transport import Submit
from serve_app.types import Operation

READ_THERE = frozenset(one for one in Operation if not (one.is_pooling or one.hears)) - {Operation.TOKENIZER_INFO}

MEDIA_TIMES = 8  # as large as others, 0.1 s of the event loop: conversations with images are that long at most
Read = Rendered | ErrorResponse | bytes


class LargeRequests:
    """Has large requests read and rendered by a helper, which starts with the first of them: it takes 0.7 GiB.

    Args:
        reads_media: whether the model does; media are read here, with the cache that EngineCore shares.
        start: starts it; returns what sends it a `Submit` in MessagePack, and returns its pickled answer. Both block.
    """

    def __init__(self, start: Callable[[], Callable[[bytes], bytes]], *, reads_media: bool = False) -> None:
        self._start = start
        self._reads_media = reads_media
        self._ask: Callable[[bytes], bytes] | None = None
        self._queue = HelperQueue(self._read)

    async def read(self, submit: Submit, *, even_small: bool = False) -> Read | None:
        """The request as the helper has read it (`render_process`); None: it is to be read here.

        Args:
            even_small: it costs more than its size says.

        Raises:
            Unavailable: the helper does not answer, or has ended.
            BadRequest: of the request; beside media there is too much to be read here.
        """
        if submit.operation not in READ_THERE:
            return None
        large = even_small or submit.is_large  # None: its router has not measured it
        if large is None and not self._reads_media:
            large = is_large(submit.operation, submit.body)
        if large is False:
            return None
        if self._reads_media:  # once, in full
            size = body_size(submit.operation, submit.body)
            if size.has_media and size.is_large(MEDIA_TIMES):
                raise BadRequest("a request with images, audio or video has too many other parts, or too much text")
            if size.has_media or not (large or size.is_large()):
                return None
        return await self._queue.ask(submit.cache_salt or "", submit)

    async def _read(self, submit: Submit) -> Read:
        def ask() -> Read | BadRequest:
            if self._ask is None:
                self._ask = self._start()
            answer: Read | BadRequest = pickle.loads(self._ask(msgspec.msgpack.encode(submit)))
            return answer

        answer = await asyncio.to_thread(ask)
        if isinstance(answer, BadRequest):
            raise answer
        return answer
