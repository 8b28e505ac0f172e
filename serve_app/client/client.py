"""The typed Python handle: a served model called from inside the cluster, a driver or a notebook, without HTTP.

    from serve_app import connect
    llm = connect(api_key=...)
    answer = await llm.chat([{"role": "user", "content": "Hi"}], max_tokens=16, priority="high", deadline_s=5)
    async for chunk in llm.stream([{"role": "user", "content": "Hi"}]): ...
    answer = llm.sync.chat([{"role": "user", "content": "Hi"}])  # in scripts and notebooks

Invariant: a call is an exchange with the ASGI app that answers HTTP, so it has the same rights, queue, metrics and
errors. Answers are the `openai` package's own types. A call whose connection is lost is repeated, and runs once. An
abandoned call (a cancelled task, an iterator that is closed or dropped, a process that dies) is aborted in the engine
within a second, one with a key of the caller's own after the server's grace. However the block of an agent session
ends, the session is closed or, if no router is reachable, expires without renewals.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar, Unpack

import httpx2
import msgspec
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, SecretStr, ValidationError

from serve_app.client import repeats
from serve_app.client.httpx_transport import BASE_URL, Transport
from serve_app.client.loop_bridge import LoopBridge
from serve_app.client.options import (
    CallOptions,
    ChatOptions,
    CompletionOptions,
    EmbedOptions,
    Messages,
    Prompt,
    SessionOptions,
)
from serve_app.client.streams import Stream, Synchronous, blocking, blocking_stream
from serve_app.errors import BadRequest, NotFound, ServeAppError
from serve_app.http import (
    CallKind,
    HttpRequest,
    make_request,
    make_route_request,
)
from serve_app.ray_adapter import ACCEPT_S, IngressHandle

CLOSE_S = 5.0  # to end running calls; it takes milliseconds
TIMEOUT = httpx2.Timeout(600.0, connect=ACCEPT_S)  # of the SDK's requests, in seconds; its own default except connect
SESSIONS = "/v1/sessions"  # the route
RENEWALS = 3  # per time to live: two failed renewals in a row do no harm
SESSION_CLOSE_S = 10.0  # to close the session after the caller's task was cancelled

logger = logging.getLogger("serve_app")

M = TypeVar("M", bound=BaseModel)
Options = TypeVar("Options", bound=CallOptions)


class Client:
    """Calls of one application with one API key; `connect` makes it. Safe to use from any thread and event loop.

    Keywords that all calls share: `model`; `priority` (`low`, `normal`, `high`, `critical`, or 0 to 3), up to the key's
    class; `session`, whose requests prefer one replica for its cached prefix; `deadline_s`, seconds from now by
    which the request must have started or is refused. Others are OpenAI's fields; `None` counts as not given.

    All calls raise `serve_app.errors`: `BadRequest`, `Unauthorized`, `Forbidden`, `NotFound`, `Overloaded` (with `code`
    and `retry_after_s`), `Unavailable`, `EngineFailed`; a stream may raise them after its first chunks.
    """

    def __init__(
        self, make: Callable[[], IngressHandle], api_key: str, leaving: contextlib.ExitStack, model: str | None = None
    ) -> None:
        self._bridge = LoopBridge(make)
        self._api_key = SecretStr(api_key)
        self._leaving = leaving
        leaving.callback(self._bridge.close, CLOSE_S)
        self._model = model
        self.only_model_name: str | None = None  # the only model served, once fetched
        self.sync = SyncClient(self, self._bridge)

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatCompletion:
        """A chat completion."""
        return await self._unary(ChatCompletion, CallKind.CHAT, messages, options)

    def stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> Stream[ChatCompletionChunk]:
        """A chat completion as it is generated; the request is sent at the first read."""
        return Stream(self._chunks(ChatCompletionChunk, CallKind.STREAM, messages, options))

    async def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion:
        """A completion of a text, of token ids, or of several of either."""
        return await self._unary(Completion, CallKind.COMPLETE, prompt, options)

    def stream_complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Stream[Completion]:
        """A completion as it is generated; the request is sent at the first read."""
        return Stream(self._chunks(Completion, CallKind.STREAM_COMPLETE, prompt, options))

    async def embed(self, input: Prompt, **options: Unpack[EmbedOptions]) -> CreateEmbeddingResponse:
        """Embeddings of one or many texts, in the same order; for models with `task: embed`."""
        return await self._unary(CreateEmbeddingResponse, CallKind.EMBED, input, options)

    def session(self, session_id: str | None = None, **asked: Unpack[SessionOptions]) -> AgentSession:
        """KV cache reserved for one agent: `async with llm.session("agent-7", vram_gb=0.25) as session`.

        Its requests, one at a time, wait for no slot and no KV tokens of other requests, on the replica with its cached
        prefix; between requests it holds no slot. The client renews it in the background and closes it with the block;
        without renewals it ends after `ttl_s`.

        Args:
            session_id: the caller's name for it; generated if not given. An open session of this size is reused.
            vram_gb: of KV cache over all ranks of the engine, in GB; or `kv_tokens`, in tokens. Exactly one of them.
            ttl_s: seconds without a renewal after which it ends; the server's default is 600.
            wait_s: seconds to wait for memory; 0, the default: refused at once (`InsufficientMemory`, with figures).
        """
        return AgentSession(self, self._bridge, {"session_id": session_id, **asked})

    async def models(self) -> list[Model]:
        """The models served; `id` is the name for calls, `max_model_len` the bound of prompt and answer, in tokens."""
        listed = msgspec.json.decode(await self.request("GET", "/v1/models"))
        return [Model.model_validate(one) for one in listed["data"]]

    @functools.cached_property
    def http_client(self) -> httpx2.AsyncClient:
        """An HTTP client that sends by handle, with this client's key if a request has none."""
        return httpx2.AsyncClient(transport=Transport(self._bridge), **self._http())

    @functools.cached_property
    def openai(self) -> AsyncOpenAI:
        """The official SDK by handle: its methods, helpers, types, timeouts and errors. It never retries by itself.

        Its streams go on after a loop is left; use `async with await llm.openai....create(stream=True) as stream`.
        """
        return AsyncOpenAI(**self._sdk(), http_client=self.http_client)

    def close(self) -> None:
        """End the running calls, and disconnect from the cluster if `connect` connected it. Later calls fail."""
        self._leaving.close()

    # For sessions and agents, which use this client.

    async def model_named(self, model: str | None) -> str:
        """The model for a call: `model`, else the only one served. Raises BadRequest: several are served."""
        named = model or self._model or self.only_model_name
        if named is None:
            served = [one.id for one in await self.models()]
            if len(served) != 1:
                raise BadRequest(f"say which model: `model` is one of {', '.join(served)}", param="model")
            named = self.only_model_name = served[0]
        return named

    async def request(self, method: str, path: str, fields: Mapping[str, Any] | None = None) -> bytes:
        """Send a request with these fields as JSON, if any; returns the answer's body. Raises `serve_app.errors`."""
        return await self._bridge.read(make_route_request(self._api_key.get_secret_value(), method, path, fields))

    async def _unary(self, type_: type[M], kind: CallKind, subject: Any, options: CallOptions) -> M:
        asked = await self._build_request(kind, subject, options)
        with self._forgetting_gone_model():
            return _as_object(type_, await repeats.read(self._bridge, asked))

    async def _chunks(
        self, type_: type[M], kind: CallKind, subject: Any, options: CallOptions
    ) -> AsyncGenerator[M, None]:
        asked = await self._build_request(kind, subject, options)
        with self._forgetting_gone_model():
            async with contextlib.aclosing(repeats.events(self._bridge, asked)) as told:
                async for event in told:
                    yield _as_object(type_, event)

    async def _build_request(self, kind: CallKind, subject: Any, options: CallOptions) -> HttpRequest:
        model, key = await self.model_named(options.get("model")), self._api_key.get_secret_value()
        asked = {**options, "api_key": key, "model": model, kind.first_field: subject}
        return repeats.with_key(make_request(kind, asked))

    @contextlib.contextmanager
    def _forgetting_gone_model(self) -> Iterator[None]:
        """Drop the cached model name when the model is not found."""
        try:
            yield
        except NotFound:
            self.only_model_name = None
            raise

    def _http(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self._api_key.get_secret_value()}"}
        return {"base_url": BASE_URL, "headers": headers, "timeout": TIMEOUT, "trust_env": False}

    def _sdk(self) -> dict[str, Any]:
        return {"base_url": BASE_URL, "api_key": self._api_key.get_secret_value(), "max_retries": 0}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client holds an API key and does not travel: call connect() in the process that uses it")


class SyncClient(Synchronous[Client]):
    """`Client` without `await`: `llm.sync.chat(...)`, `for chunk in llm.sync.stream(...)`; otherwise as `Client`."""

    chat = blocking(Client.chat)
    stream = blocking_stream(Client.stream)
    complete = blocking(Client.complete)
    stream_complete = blocking_stream(Client.stream_complete)
    embed = blocking(Client.embed)
    models = blocking(Client.models)

    def session(self, session_id: str | None = None, **asked: Unpack[SessionOptions]) -> SyncAgentSession:
        """As `Client.session`: `with llm.sync.session("agent-7", vram_gb=0.25) as session`."""
        return SyncAgentSession(self._wrapped.session(session_id, **asked), self._bridge)

    @functools.cached_property
    def http_client(self) -> httpx2.Client:
        """As `Client.http_client`."""
        return httpx2.Client(transport=Transport(self._bridge), **self._wrapped._http())

    @functools.cached_property
    def openai(self) -> OpenAI:
        """As `Client.openai`."""
        return OpenAI(**self._wrapped._sdk(), http_client=self.http_client)


class SessionInfo(BaseModel):
    """The server's description of a session. `granted_bytes` are over all ranks of its engine."""

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
    the session has ended (its engine died): later calls run without the session's memory.
    """

    def __init__(self, client: Client, bridge: LoopBridge, asked: dict[str, Any]) -> None:
        self._client, self._bridge = client, bridge
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
        self._bridge.run(self._wrapped.open)
        return self

    def __exit__(self, *_: object) -> None:
        self._bridge.run(self._wrapped.close)


def _as_object(type_: type[M], data: bytes) -> M:
    """The answer as the `openai` package returns it: validated, which is also twenty times as fast, or unvalidated if
    a value is not one of OpenAI's own servers."""
    try:
        return type_.model_validate_json(data)
    except ValidationError:
        return type_.model_construct(**msgspec.json.decode(data))
