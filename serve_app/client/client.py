"""The typed Python handle: a served model called from inside the cluster, a driver or a notebook, without HTTP.

    from serve_app import connect
    llm = connect(api_key=...)
    answer = await llm.chat([{"role": "user", "content": "Hi"}], max_tokens=16, priority="high", deadline_s=5)
    async for chunk in llm.stream([{"role": "user", "content": "Hi"}]): ...
    answer = llm.sync.chat([{"role": "user", "content": "Hi"}])  # in scripts and notebooks

Invariant: a call is an exchange with the ASGI app that answers HTTP, so it has the same rights, queue, metrics and
errors. Answers are the `openai` package's own types. A call whose connection is lost is repeated, and runs once. An
abandoned call (a cancelled task, an iterator that is closed or dropped, a process that dies) is aborted in the engine
within a second, one with a key of the caller's own after the server's grace.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar, Unpack

import httpx2
import msgspec
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, SecretStr, ValidationError

from serve_app.client import repeats
from serve_app.client.agent_session import AgentSession, SyncAgentSession
from serve_app.client.caller_span import with_caller_span
from serve_app.client.httpx_transport import BASE_URL, Transport
from serve_app.client.loop_bridge import LoopBridge
from serve_app.client.map import (
    CONCURRENCY,
    PATIENCE_S,
    PRIORITY,
    Answer,
    Ask,
    MapOptions,
    MapResult,
    results_of,
    sync_results_of,
)
from serve_app.client.map_progress import Report
from serve_app.client.options import (
    CallOptions,
    ChatOptions,
    CompletionOptions,
    EmbedOptions,
    MapItem,
    Messages,
    Priority,
    Prompt,
    SessionOptions,
)
from serve_app.client.streams import Stream, Synchronous, SyncStream, blocking, blocking_stream
from serve_app.errors import BadRequest, NotFound
from serve_app.http import (
    CallKind,
    HttpRequest,
    make_request,
    make_route_request,
)
from serve_app.ray_adapter import ACCEPT_S, IngressHandle

CLOSE_S = 5.0  # to end running calls; it takes milliseconds
TIMEOUT = httpx2.Timeout(600.0, connect=ACCEPT_S)  # of the SDK's requests, in seconds; its own default except connect

ANSWERS: Mapping[CallKind, type[Answer]] = {
    CallKind.CHAT: ChatCompletion,
    CallKind.COMPLETE: Completion,
    CallKind.EMBED: CreateEmbeddingResponse,
}

M = TypeVar("M", bound=BaseModel)


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

    def map(
        self,
        prompts: Iterable[MapItem] | AsyncIterable[MapItem],
        *,
        concurrency: int = CONCURRENCY,
        priority: Priority | None = PRIORITY,
        ordered: bool = True,
        progress: bool | Report | None = None,
        patience_s: float = PATIENCE_S,
        **options: Any,
    ) -> Stream[MapResult]:
        """One call for each of any number of prompts: `async for result in llm.map(prompts, max_tokens=16)`.

        Reads a prompt when it can be sent, so an endless source will do, and keeps at most four times `concurrency` of
        them, with their results. A refused prompt is sent again at the moment that the server told, under the same
        `Idempotency-Key`, and no new one is sent before. Leaving the loop aborts what runs, and closes the source.

        Args:
            prompts: an iterable or an async iterable of texts or token ids (completions), lists of messages (chats), or
                mappings with `prompt`, `messages` or `input` (embeddings) whose other fields override `options`. An
                iterable that is neither async nor a list, tuple, set or range is read in a thread of its own.
            concurrency: requests in flight at most.
            ordered: results in the order of `prompts`; else as they end.
            progress: True: a bar on stderr; or a function, called with a `MapProgress` at each result.
            patience_s: for how long a prompt may be refused; then the refusal is its result.
            options: as of `chat`, `complete` or `embed`.

        Raises:
            ValueError, TypeError, BadRequest: an argument is wrong, at once. While results are read: what `prompts`
            or `progress` raised. An error of a call is in its result.
        """
        fields = {"priority": priority, **options}
        return results_of(self.prepare, prompts, MapOptions(concurrency, ordered, patience_s, fields), progress)

    async def models(self) -> list[Model]:
        """The models served; `id` is the name for calls, `max_model_len` the bound of prompt and answer, in tokens, or
        None before the first start of a model that does not configure it."""
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

    # For sessions, agents and maps, which use this client.

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

    async def prepare(self, kind: CallKind, subject: Any, options: Mapping[str, Any]) -> Ask:
        """A call that can be sent several times, under one key. Raises BadRequest: as the call itself."""
        asked = await self._build_request(kind, subject, options)
        type_ = ANSWERS[kind]

        async def ask(attempts: int) -> Answer:
            return await self._answer(type_, repeats.again(asked, attempts))

        return ask

    async def _unary(self, type_: type[M], kind: CallKind, subject: Any, options: CallOptions) -> M:
        return await self._answer(type_, await self._build_request(kind, subject, options))

    async def _answer(self, type_: type[M], asked: HttpRequest) -> M:
        with self._forgetting_gone_model():
            return _as_object(type_, await repeats.read(self._bridge, asked))

    async def _chunks(
        self, type_: type[M], kind: CallKind, subject: Any, options: CallOptions
    ) -> AsyncGenerator[M, None]:
        asked = await self._build_request(kind, subject, options)
        with self._forgetting_gone_model():
            async with contextlib.aclosing(repeats.events(self._bridge, asked)) as events:
                async for event in events:
                    yield _as_object(type_, event)

    async def _build_request(self, kind: CallKind, subject: Any, options: Mapping[str, Any]) -> HttpRequest:
        model = await self.model_named(options.get("model"))
        key = self._api_key.get_secret_value()
        asked = {**options, "api_key": key, "model": model, kind.first_field: subject}
        return with_caller_span(repeats.with_key(make_request(kind, asked)))

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

    def map(
        self,
        prompts: Iterable[MapItem],
        *,
        concurrency: int = CONCURRENCY,
        priority: Priority | None = PRIORITY,
        ordered: bool = True,
        progress: bool | Report | None = None,
        patience_s: float = PATIENCE_S,
        **options: Any,
    ) -> SyncStream[MapResult]:
        """As `Client.map`: `for result in llm.sync.map(prompts)`. `prompts` cannot be async. The thread that waits for
        a result reads `prompts` and calls `progress` meanwhile."""
        fields = {"priority": priority, **options}
        made = MapOptions(concurrency, ordered, patience_s, fields)
        return sync_results_of(self._wrapped.prepare, self._bridge, prompts, made, progress)

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


def _as_object(type_: type[M], data: bytes) -> M:
    """The answer as the `openai` package returns it: validated, which is also twenty times as fast, or unvalidated if
    a value is not one of OpenAI's own servers."""
    try:
        return type_.model_validate_json(data)
    except ValidationError:
        return type_.model_construct(**msgspec.json.decode(data))
