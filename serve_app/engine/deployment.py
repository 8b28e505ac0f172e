"""The engine replica: one engine, the channels of the routers that use it, and Serve's lifecycle around both.

Invariant: a request lives here as long as the unary call that handed it in. When that call is cancelled, when its
router's channel breaks, or when the replica shuts down, the request is aborted inside the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from serve_app.engine import environment
from serve_app.engine.outbox import Outbox
from serve_app.engine.protocol import EngineBackend, EngineInfo, EngineLoad, Frame, Submit
from serve_app.errors import EngineFailed, EngineUnreachable
from serve_app.settings import ModelSettings

logger = logging.getLogger("ray.serve")

# vLLM tokenizes in a thread. At Python's 5 ms it gets the interpreter once the event loop has served a whole batch.
THREAD_SWITCH_S = 0.0005
LAST_WORDS_S = 0.5  # for the errors of its requests to reach their routers; Serve's own checks would take 15 s
EXIT_ENGINE_DEAD = 70  # EX_SOFTWARE
CHANNEL_WAIT_S = 5.0  # a router hands requests in only after its channel stands; a broken one is back within a second
BREAK_GRACE_S = 0.5  # requests of a broken channel are aborted within a second: half of it for a reconnect


def end_process(status: int) -> None:
    """End this process without asking anyone; a function of its own so that tests can live."""
    os._exit(status)


def make_backend(settings: ModelSettings) -> EngineBackend:
    """The engine that the settings ask for; imports vLLM only where it is used."""
    if settings.engine == "simulated":
        from serve_app.engine.simulated import SimulatedEngine

        return SimulatedEngine(settings)
    environment.prepare(settings.ranks)
    from serve_app.engine.vllm_adapter import VllmEngine

    return VllmEngine(settings, time.monotonic)


class _Attachment:
    """One router's channel and the requests that came over it."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        self.streams = 0  # attach() calls now open


class EngineReplica:
    """Serve deployment class of an engine.

    Args:
        settings: the model, as a plain mapping (Serve pickles constructor arguments).
    """

    async def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = ModelSettings.model_validate(settings)
        self._attachments: dict[str, _Attachment] = {}
        self._ending = False
        sys.setswitchinterval(THREAD_SWITCH_S)
        self._backend = make_backend(self._settings)
        started = time.monotonic()
        self._info = await self._backend.start()
        logger.info(
            "engine %s ready after %.1f s: %d KV tokens, %d slots, max length %d",
            self._info.model,
            time.monotonic() - started,
            self._info.kv_cache_tokens,
            self._info.slots,
            self._info.max_model_len,
        )

    async def info(self, replica_id: str) -> EngineInfo:
        """What this engine can do. `replica_id` is for routing, here and below."""
        return self._info

    async def load(self, replica_id: str) -> EngineLoad:
        """Live figures of the engine."""
        return self._backend.load()

    async def attach(self, router_id: str, replica_id: str) -> AsyncIterator[bytes]:
        """The channel to one router: encoded `Batch` messages until the router closes it."""
        attachment = self._attachments.setdefault(router_id, _Attachment())
        attachment.streams += 1
        self._share_slots()
        try:
            async for message in attachment.outbox.messages():
                yield message
        finally:
            attachment.streams -= 1
            if not attachment.streams:
                asyncio.get_running_loop().call_later(BREAK_GRACE_S, self._detach, router_id)

    async def submit(self, router_id: str, submit: Submit, replica_id: str) -> None:
        """Run one request to its end; its frames leave through the router's channel, the last one with its usage.

        Raises:
            EngineFailed: the engine broke under the request, frames may have left; or the router has no channel here.
        """
        attachment = await self._attached(router_id)
        # A task of its own: each token resumes every frame of the task that waits for it, and Serve's add a dozen.
        task = attachment.tasks[submit.number] = asyncio.create_task(self._relay(submit, attachment.outbox))
        try:
            await task
        except EngineFailed as error:
            if not self._backend.alive:
                self._give_up(error)
            raise
        finally:
            del attachment.tasks[submit.number]

    async def _relay(self, submit: Submit, outbox: Outbox) -> None:
        number = submit.number
        async with contextlib.aclosing(self._backend.run(submit)) as pieces:
            async for piece in pieces:
                outbox.put(
                    Frame(
                        number, piece.body, piece.status, piece.media, piece.groups, 1 if piece.body else 0, piece.usage
                    )
                )

    async def _attached(self, router_id: str) -> _Attachment:
        deadline = time.monotonic() + CHANNEL_WAIT_S
        while time.monotonic() < deadline:
            attachment = self._attachments.get(router_id)
            if attachment is not None and attachment.streams:
                return attachment
            await asyncio.sleep(0.01)
        raise EngineUnreachable(f"router {router_id} has no channel to this replica")

    def _detach(self, router_id: str) -> None:
        attachment = self._attachments.get(router_id)
        if attachment is None or attachment.streams:
            return
        del self._attachments[router_id]
        for task in attachment.tasks.values():
            task.cancel()
        self._share_slots()

    def _share_slots(self) -> None:
        """Divide the batch among the attached routers; what the division leaves over goes to the first ones."""
        count = len(self._attachments)
        for index, attachment in enumerate(self._attachments.values()):
            share = self._info.slots // count + (index < self._info.slots % count)
            attachment.outbox.set_slots(max(1, share))

    async def check_health(self) -> None:
        """Called by Serve; raises when the engine is dead or frozen. Then the replica ends by itself: Serve would ask
        twice more, and wait for the requests of an engine that will never answer them."""
        try:
            await self._backend.check_health()
        except EngineFailed as error:
            self._give_up(error)
            raise

    def _give_up(self, error: EngineFailed) -> None:
        """End this process and the engine's, soon; Serve starts another replica at once."""
        if not self._ending:
            self._ending = True
            logger.error("this replica ends: %s", error.message)
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._end)

    def _end(self) -> None:
        self._backend.kill()
        end_process(EXIT_ENGINE_DEAD)

    async def __del__(self) -> None:
        self._ending = True
        backend = getattr(self, "_backend", None)
        if backend is not None:
            await backend.shutdown()
