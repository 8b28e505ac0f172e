"""Agent sessions by handle: KV cache reserved for one agent, renewed in the background, closed with their block.

Invariant: however the block of a session ends, the session is closed or, if no router is reachable, expires without
renewals.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, Unpack

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from serve_app.client.loop_bridge import LoopBridge
from serve_app.client.options import CallOptions, ChatOptions, CompletionOptions, Messages, Prompt
from serve_app.client.streams import Stream, Synchronous, blocking, blocking_stream
from serve_app.errors import NotFound, ServeAppError

SESSIONS = "/v1/sessions"  # the route
RENEWALS = 3  # per time to live: two failed renewals in a row do no harm
SESSION_CLOSE_S = 10.0  # to close the session after the caller's task was cancelled

logger = logging.getLogger("serve_app")

Options = TypeVar("Options", bound=CallOptions)


class Calls(Protocol):
    """What a session needs of `serve_app.client.client.Client`."""

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatCompletion: ...

    def stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> Stream[ChatCompletionChunk]: ...

    async def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion: ...

    def stream_complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Stream[Completion]: ...

    async def model_named(self, model: str | None) -> str: ...

    async def request(self, method: str, path: str, fields: Mapping[str, Any] | None = None) -> bytes: ...


class SessionInfo(BaseModel):
    """The server's description of a session. `granted_bytes` are over all ranks of its engine.

    `taken_back_in_s`: when it ends, since others wait for its memory; None: it does not.
    """

    id: str
    model: str
    replica: str
    kv_tokens: int
    granted_bytes: int
    ttl_s: float
    expires_in_s: float
    taken_back_in_s: float | None = None


class AgentSession:
    """`async with llm.session("agent-7", vram_gb=0.25) as session: await session.chat(...)`; see `Client.session`.

    Its calls are the client's own with `session=` and the session's model. `lost` turns true when a renewal finds that
    the session has ended (its engine died, or it was taken back): later calls run without the session's memory.
    """

    def __init__(self, client: Calls, bridge: LoopBridge, asked: dict[str, Any]) -> None:
        self._client = client
        self._bridge = bridge
        self._options = asked
        self._info: SessionInfo | None = None
        self._renewing: concurrent.futures.Future[None] | None = None
        self.lost = False

    @property
    def info(self) -> SessionInfo:
        """The granted session. RuntimeError: the session is not open yet."""
        if self._info is None:
            raise RuntimeError("the session is not open: use `async with`, or `with llm.sync.session(...)`")
        return self._info

    @property
    def id(self) -> str:
        return self.info.id

    async def open(self) -> SessionInfo:
        """Open the session, as `async with` does.

        Raises:
            InsufficientMemory: it did not fit within `wait_s`. BadRequest: it can never fit, or a value is wrong.
        """
        asked = self._options
        model = await self._client.model_named(asked.get("model"))
        # Shielded: a caller that is cancelled now must not leave an open session behind.
        opening = asyncio.ensure_future(self._request(SESSIONS, {**asked, "model": model}))
        try:
            self._info = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServeAppError):
                self._info = await opening
                await self.close()
            raise
        self._renewing = self._bridge.submit(self._renew_periodically)
        return self._info

    async def close(self) -> None:
        """Close the session, as `async with` does at its end; no effect on a session that has ended."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        if self._info is None or self.lost:
            return
        self.lost = True
        with contextlib.suppress(NotFound):
            await self._client.request("DELETE", f"{SESSIONS}/{self._info.id}")

    async def renew(self) -> SessionInfo:
        """Extend the session by its time to live. Raises NotFound: it has ended."""
        self._info = await self._request(f"{SESSIONS}/{self.info.id}/renew")
        return self._info

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatCompletion:
        """As `Client.chat`."""
        return await self._client.chat(messages, **self._with_session(options))

    def stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> Stream[ChatCompletionChunk]:
        """As `Client.stream`."""
        return self._client.stream(messages, **self._with_session(options))

    async def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion:
        """As `Client.complete`."""
        return await self._client.complete(prompt, **self._with_session(options))

    def stream_complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Stream[Completion]:
        """As `Client.stream_complete`."""
        return self._client.stream_complete(prompt, **self._with_session(options))

    def _with_session(self, options: Options) -> Options:
        """Raises TypeError: model or session is given, which the session decides."""
        given = options.keys() & {"model", "session"}
        if given:
            raise TypeError(f"{min(given)} cannot be given here: the session decides it")
        options["model"] = self.info.model
        options["session"] = self.id
        return options

    async def __aenter__(self) -> AgentSession:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        closing = asyncio.ensure_future(self.close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing}, timeout=SESSION_CLOSE_S)
            raise

    async def _request(self, path: str, fields: Mapping[str, Any] | None = None) -> SessionInfo:
        return SessionInfo.model_validate_json(await self._client.request("POST", path, fields))

    async def _renew_periodically(self) -> None:
        """Renew in the client's own loop: a tool may block the caller's loop."""
        while True:
            await asyncio.sleep(self.info.ttl_s / RENEWALS)
            try:
                await self.renew()
            except NotFound as error:
                self.lost = True
                logger.warning("Session %s is lost; its calls run without its memory from now on: %s", self.id, error)
                return
            except ServeAppError as error:
                logger.warning(
                    "Session %s could not be renewed and expires unless a later try succeeds: %s", self.id, error
                )


class SyncAgentSession(Synchronous[AgentSession]):
    """The same without `await`: `with llm.sync.session("agent-7", vram_gb=0.25) as session: session.chat(...)`."""

    @property
    def info(self) -> SessionInfo:
        return self._wrapped.info

    @property
    def id(self) -> str:
        return self._wrapped.id

    @property
    def lost(self) -> bool:
        return self._wrapped.lost

    renew = blocking(AgentSession.renew)
    chat = blocking(AgentSession.chat)
    stream = blocking_stream(AgentSession.stream)
    complete = blocking(AgentSession.complete)
    stream_complete = blocking_stream(AgentSession.stream_complete)

    def __enter__(self) -> SyncAgentSession:
        self._bridge.run(self._wrapped.open)
        return self

    def __exit__(self, *_: object) -> None:
        self._bridge.run(self._wrapped.close)
