"""An agent session in the caller's hands: opened by `with`, renewed beside the caller's work, closed at the end.

Invariant: whatever ends the block, the session is given back or, if nobody can be reached, ends by its own silence.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from pydantic import BaseModel, ConfigDict

from serve_app.client.loop_bridge import Link
from serve_app.client.options import CallOptions, ChatOptions, CompletionOptions, Messages, Prompt
from serve_app.client.streams import Stream
from serve_app.client.sync import Synchronous, blocking, blocking_stream
from serve_app.errors import NotFound, ServeAppError

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk


logger = logging.getLogger("serve_app")

Options = TypeVar("Options", bound=CallOptions)

ROUTE = "/v1/sessions"
RENEWALS = 3  # in a time to live: one that is lost, and the next, cost nothing
CLOSE_S = 10.0  # for the session to be given back where the caller's task was cancelled


class SessionCalls(Protocol):
    """The calls of `Client` that a session makes."""

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatCompletion: ...

    def stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> Stream[ChatCompletionChunk]: ...

    async def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion: ...

    def stream_complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Stream[Completion]: ...

    async def model_named(self, model: str | None) -> str: ...

    async def request(self, method: str, path: str, fields: Mapping[str, Any] | None = None) -> bytes: ...


class SessionInfo(BaseModel):
    """What the server says of a session. `granted_bytes` are over all ranks of its engine."""

    model_config = ConfigDict(extra="ignore")

    id: str
    model: str
    replica: str
    kv_tokens: int
    granted_bytes: int
    ttl_s: float
    expires_in_s: float


class AgentSession:
    """`async with llm.session("agent-7", vram_gb=0.25) as session: await session.chat(...)`; see `Client.session`.

    Its calls are the client's own with `session=` and the session's model. `lost` turns true when a renewal finds that
    the session has ended (its engine died): calls go on, as ordinary ones.
    """

    def __init__(self, client: SessionCalls, link: Link, asked: dict[str, Any]) -> None:
        self._client, self._link = client, link
        self._asked = asked
        self._info: SessionInfo | None = None
        self._renewing: concurrent.futures.Future[None] | None = None
        self.lost = False

    @property
    def info(self) -> SessionInfo:
        """What was granted. RuntimeError: the session is not open yet."""
        if self._info is None:
            raise RuntimeError("the session is not open: use `async with`, or `with llm.sync.session(...)`")
        return self._info

    @property
    def id(self) -> str:
        return self.info.id

    async def open(self) -> SessionInfo:
        """What `async with` does at its beginning.

        Raises:
            InsufficientMemory: it does not fit, and did not in `wait_s`. BadRequest: it never will, or a wrong value.
        """
        asked = self._asked
        model = await self._client.model_named(asked.get("model"))
        # Shielded: a caller who leaves now must not leave behind a session that nobody closes.
        opening = asyncio.ensure_future(self._request(ROUTE, {**asked, "model": model}))
        try:
            self._info = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServeAppError):
                self._info = await opening
                await self.close()
            raise
        self._renewing = self._link.beside(self._renew_for_ever())
        return self._info

    async def close(self) -> None:
        """What `async with` does at its end; again, or of one that has ended by itself, changes nothing."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        if self._info is None or self.lost:
            return
        self.lost = True
        with contextlib.suppress(NotFound):
            await self._client.request("DELETE", f"{ROUTE}/{self._info.id}")

    async def renew(self) -> SessionInfo:
        """Put off its end by its time to live. Raises NotFound: it has ended."""
        self._info = await self._request(f"{ROUTE}/{self.info.id}/renew")
        return self._info

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatCompletion:
        """As `Client.chat`."""
        return await self._client.chat(messages, **self._within(options))

    def stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> Stream[ChatCompletionChunk]:
        """As `Client.stream`."""
        return self._client.stream(messages, **self._within(options))

    async def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion:
        """As `Client.complete`."""
        return await self._client.complete(prompt, **self._within(options))

    def stream_complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Stream[Completion]:
        """As `Client.stream_complete`."""
        return self._client.stream_complete(prompt, **self._within(options))

    def _within(self, options: Options) -> Options:
        options["model"], options["session"] = self.info.model, self.id
        return options

    async def __aenter__(self) -> AgentSession:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        closing = asyncio.ensure_future(self.close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing}, timeout=CLOSE_S)
            raise

    async def _request(self, path: str, fields: Mapping[str, Any] | None = None) -> SessionInfo:
        return SessionInfo.model_validate_json(await self._client.request("POST", path, fields))

    async def _renew_for_ever(self) -> None:
        """In the client's own loop: the caller's may stand still in a tool."""
        while True:
            await asyncio.sleep(self.info.ttl_s / RENEWALS)
            try:
                await self.renew()
            except NotFound as error:
                self.lost = True
                logger.warning("session %s is lost, its calls are ordinary ones from now on: %s", self.id, error)
                return
            except ServeAppError as error:
                logger.warning("session %s could not be renewed, and will be again: %s", self.id, error)


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
        self._link.run(self._wrapped.open())
        return self

    def __exit__(self, *_: object) -> None:
        self._link.run(self._wrapped.close())
