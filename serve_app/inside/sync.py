"""The handle without `await`, for scripts and notebooks: the same calls, run in the link's own event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from serve_app.inside.link import Link
from serve_app.inside.options import ChatOptions, CompletionOptions, EmbedOptions, Messages, Priority, Prompt
from serve_app.inside.sessions import SyncAgentSession
from serve_app.inside.streams import SyncStream

if TYPE_CHECKING:
    from openai.types import Completion, CreateEmbeddingResponse, Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from serve_app.handle import Client


class SyncClient:
    """`Client` without `await`: `llm.sync.chat(...)`, `for chunk in llm.sync.stream(...)`; see there for what is what.

    Works in any thread, in one whose event loop runs too (a notebook's cell; that loop waits meanwhile). Only the event
    loop of a Serve replica refuses, with a RuntimeError: there the calls themselves run in it.
    """

    def __init__(self, client: Client, link: Link) -> None:
        self._client = client
        self._link = link

    def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        priority: Priority | None = None,
        session: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion:
        """As `Client.chat`."""
        call = self._client.chat(
            messages, model=model, priority=priority, session=session, deadline_s=deadline_s, **options
        )
        return self._link.run(call)

    def stream(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        priority: Priority | None = None,
        session: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> SyncStream[ChatCompletionChunk]:
        """As `Client.stream`."""
        stream = self._client.stream(
            messages, model=model, priority=priority, session=session, deadline_s=deadline_s, **options
        )
        return SyncStream(self._link, stream)

    def complete(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        priority: Priority | None = None,
        session: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[CompletionOptions],
    ) -> Completion:
        """As `Client.complete`."""
        call = self._client.complete(
            prompt, model=model, priority=priority, session=session, deadline_s=deadline_s, **options
        )
        return self._link.run(call)

    def stream_complete(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        priority: Priority | None = None,
        session: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[CompletionOptions],
    ) -> SyncStream[Completion]:
        """As `Client.stream_complete`."""
        stream = self._client.stream_complete(
            prompt, model=model, priority=priority, session=session, deadline_s=deadline_s, **options
        )
        return SyncStream(self._link, stream)

    def embed(
        self,
        input: Prompt,
        *,
        model: str | None = None,
        priority: Priority | None = None,
        session: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> CreateEmbeddingResponse:
        """As `Client.embed`."""
        call = self._client.embed(
            input, model=model, priority=priority, session=session, deadline_s=deadline_s, **options
        )
        return self._link.run(call)

    def session(
        self,
        session_id: str | None = None,
        *,
        model: str | None = None,
        vram_gb: float | None = None,
        kv_tokens: int | None = None,
        ttl_s: float | None = None,
        wait_s: float | None = None,
    ) -> SyncAgentSession:
        """As `Client.session`: `with llm.sync.session("agent-7", vram_gb=0.25) as session`."""
        asked = self._client.session(
            session_id, model=model, vram_gb=vram_gb, kv_tokens=kv_tokens, ttl_s=ttl_s, wait_s=wait_s
        )
        return SyncAgentSession(asked, self._link)

    def models(self) -> list[Model]:
        """As `Client.models`."""
        return self._link.run(self._client.models())
