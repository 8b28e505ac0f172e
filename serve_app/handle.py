"""The typed Python handle: a served model called from inside the cluster, a driver or a notebook, without HTTP.

    from serve_app import connect
    llm = connect(api_key=...)
    answer = await llm.chat([{"role": "user", "content": "Hi"}], max_tokens=16, priority="high", deadline_s=5)
    async for chunk in llm.stream([{"role": "user", "content": "Hi"}]): ...
    answer = llm.sync.chat([{"role": "user", "content": "Hi"}])  # in scripts and notebooks

Invariant: a call is an exchange with the edge that answers HTTP, so it has the same rights, line, metrics and errors.
Answers are the `openai` package's own types. A call whose caller leaves (a cancelled task, an iterator that is closed
or dropped, a process that dies) is aborted in the engine within a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from types import TracebackType
from typing import Any, NoReturn, TypeVar, Unpack

from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from serve_app.errors import BadRequest, NotFound
from serve_app.inside.calls import (
    CHAT,
    COMPLETE,
    EMBED,
    STREAM,
    STREAM_COMPLETE,
    Asked,
    Kind,
    Reader,
    SessionWay,
    ask,
    ask_models,
    ask_session,
)
from serve_app.inside.connection import Connection, connection
from serve_app.inside.link import Link
from serve_app.inside.objects import ModelList, as_object
from serve_app.inside.options import ChatOptions, CompletionOptions, EmbedOptions, Messages, Priority, Prompt
from serve_app.inside.sessions import AgentSession
from serve_app.inside.streams import Stream
from serve_app.inside.sync import SyncClient
from serve_app.names import APPLICATION

CLOSE_S = 5.0  # for calls that run to be ended; it takes milliseconds

M = TypeVar("M", bound=BaseModel)


def connect(
    api_key: str | None = None,
    *,
    application: str = APPLICATION,
    instance: str | None = None,
    address: str | None = None,
    model: str | None = None,
) -> Client:
    """A client of a running application; nothing is sent yet but what it takes to find it.

    A process that Ray runs or that has called `ray.init` uses the cluster it is in. Any other is connected: to
    `instance`, to `address`, to the one in RAY_ADDRESS, or to what `make serve` runs on this machine. It stays
    connected until this client is closed.

    Args:
        api_key: decides tenant and rights, as over HTTP. Default: SERVE_APP_API_KEY, or the local instance's own key.
        application: its name in Serve.
        instance: the name of a local instance (`serve-app up --instance`).
        address: host:port of a cluster's GCS; its token, if it asks for one, is in the environment as Ray wants it.
        model: for calls that name none. Default: the only one served.

    Raises:
        ConfigError: nothing to connect to, no such application, or no key; the message says what to do.
    """
    found = connection(application, instance=instance, address=address, api_key=api_key)
    return Client(found, model=model)


class Client:
    """Calls of one application with one API key; see `connect`. Safe to use from any thread and event loop.

    Keywords that all calls share: `model`; `priority` (`low`, `normal`, `high`, `critical`, or 0 to 3), within what the
    key allows; `session`, whose requests prefer one replica for its cached prefix; `deadline_s`, seconds from now by
    which the request must have started or is refused. Others are OpenAI's fields; `None` counts as not given.

    All calls raise `serve_app.errors`: `BadRequest`, `Unauthorized`, `Forbidden`, `NotFound`, `Overloaded` (with `code`
    and `retry_after_s`), `Unavailable`, `EngineFailed`; a stream may raise them in its course.
    """

    def __init__(self, found: Connection, *, model: str | None = None) -> None:
        self._connection = found
        self._link = Link(found.open)
        self._model = model
        self._only: str | None = None  # the only model served, once asked
        self.sync = SyncClient(self, self._link)

    async def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        priority: Priority | None = None,
        session: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion:
        """A chat completion."""
        contract = {"priority": priority, "session": session, "deadline_s": deadline_s}
        return await self._whole(ChatCompletion, CHAT, messages, model, {**contract, **options})

    def stream(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        priority: Priority | None = None,
        session: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream[ChatCompletionChunk]:
        """A chat completion as it is generated; sent when it is first read."""
        contract = {"priority": priority, "session": session, "deadline_s": deadline_s}
        batches = self._chunks(ChatCompletionChunk, STREAM, messages, model, {**contract, **options})
        return Stream(batches)

    async def complete(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        priority: Priority | None = None,
        session: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[CompletionOptions],
    ) -> Completion:
        """A completion of a text, of token ids, or of several of either."""
        contract = {"priority": priority, "session": session, "deadline_s": deadline_s}
        return await self._whole(Completion, COMPLETE, prompt, model, {**contract, **options})

    def stream_complete(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        priority: Priority | None = None,
        session: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[CompletionOptions],
    ) -> Stream[Completion]:
        """A completion as it is generated; sent when it is first read."""
        contract = {"priority": priority, "session": session, "deadline_s": deadline_s}
        return Stream(self._chunks(Completion, STREAM_COMPLETE, prompt, model, {**contract, **options}))

    async def embed(
        self,
        input: Prompt,
        *,
        model: str | None = None,
        priority: Priority | None = None,
        session: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> CreateEmbeddingResponse:
        """Embeddings of one or many texts, in their order; for models with `task: embed`."""
        contract = {"priority": priority, "session": session, "deadline_s": deadline_s}
        return await self._whole(CreateEmbeddingResponse, EMBED, input, model, {**contract, **options})

    def session(
        self,
        session_id: str | None = None,
        *,
        model: str | None = None,
        vram_gb: float | None = None,
        kv_tokens: int | None = None,
        ttl_s: float | None = None,
        wait_s: float | None = None,
    ) -> AgentSession:
        """KV cache reserved for one agent: `async with llm.session("agent-7", vram_gb=0.25) as session`.

        Its requests, one at a time, wait for no slot and for no others' tokens, on the replica that holds its cached
        prefix; between them it holds no slot. It is renewed in the background, closed with the block, and ends when its
        process has been silent for `ttl_s`.

        Args:
            session_id: the caller's own name for it; made up if not given. Open already with the same size: that one.
            vram_gb: of KV cache over all ranks of the engine, in GB; or `kv_tokens`, in tokens. One of them.
            ttl_s: seconds of silence after which it ends; the server's default is 600.
            wait_s: seconds to wait for room; 0, the default: refused at once (`InsufficientMemory`, with the figures).
        """
        asked = {
            "model": model,
            "session_id": session_id,
            "vram_gb": vram_gb,
            "kv_tokens": kv_tokens,
            "ttl_s": ttl_s,
            "wait_s": wait_s,
        }
        return AgentSession(self, self._link, asked)

    async def models(self) -> list[Model]:
        """The models served; `id` is what calls name, `max_model_len` the longest prompt and answer, in tokens."""
        return (await self._read(ModelList, ask_models(self._connection.api_key))).data

    def close(self) -> None:
        """End the calls that run, and leave the cluster if `connect` joined it. Nothing can be called after that."""
        if self._link.closed:
            return
        try:
            self._link.close(CLOSE_S)
        finally:
            self._connection.leave()

    # For what is built on this client: sessions, agents.

    async def model_named(self, model: str | None) -> str:
        """The model of a call that names this one, or none. Raises BadRequest: several are served."""
        return model or self._model or await self._only_model()

    async def session_told(self, way: SessionWay) -> bytes:
        """The body of the answer to a call of a session."""
        return await self._body(ask_session(self._connection.api_key, way))

    async def _whole(self, type_: type[M], kind: Kind, subject: Any, model: str | None, options: dict[str, Any]) -> M:
        asked = await self._asked(kind, subject, model, options)
        with self._noticing():
            return await self._read(type_, asked)

    async def _read(self, type_: type[M], asked: Asked) -> M:
        return as_object(type_, await self._body(asked))

    async def _body(self, asked: Asked) -> bytes:
        reader = Reader(streamed=False)
        async with contextlib.aclosing(self._link.exchange(asked)) as batches:
            async for batch in batches:
                for piece in batch:
                    reader.feed(piece)
        return reader.end()

    async def _chunks(
        self, type_: type[M], kind: Kind, subject: Any, model: str | None, options: dict[str, Any]
    ) -> AsyncGenerator[list[M], None]:
        asked = await self._asked(kind, subject, model, options)
        reader = Reader(streamed=True)
        with self._noticing():
            async with contextlib.aclosing(self._link.exchange(asked)) as batches:
                async for batch in batches:
                    chunks = [as_object(type_, event) for piece in batch for event in reader.feed(piece)]
                    if chunks:
                        yield chunks
            reader.end()

    async def _asked(self, kind: Kind, subject: Any, model: str | None, options: dict[str, Any]) -> Asked:
        named = await self.model_named(model)
        return ask(kind, {"api_key": self._connection.api_key, "model": named, kind.subject: subject, **options})

    async def _only_model(self) -> str:
        if self._only is None:
            served = [one.id for one in await self.models()]
            if len(served) != 1:
                raise BadRequest(f"say which model: `model` is one of {', '.join(served)}", param="model")
            self._only = served[0]
        return self._only

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        """Forget the only model once it is gone."""
        try:
            yield
        except NotFound:
            self._only = None
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, type_: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client holds an API key and does not travel: call connect() in the process that uses it")
