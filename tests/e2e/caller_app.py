"""Another Serve application, whose deployment calls the served models by handle: what a user of ours would write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve import Application

from serve_app import connect
from serve_app.errors import ServeAppError
from serve_app.names import APPLICATION

MODEL = "tiny-sim"
NAME = "caller"


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=100)
class Caller:
    """Calls by a plain Serve handle, without our client (`plain`), and with it (`llm`)."""

    def __init__(self, api_key: str) -> None:
        self.key = api_key
        self.plain = serve.get_app_handle(APPLICATION)
        self.llm = connect(api_key, model=MODEL)

    async def plainly(self, messages: list[Any], **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self.plain.chat.remote(messages, api_key=self.key, model=MODEL, **options)
        return answer

    async def stream_plainly(self, messages: list[Any], **options: Any) -> AsyncIterator[str]:
        stream = self.plain.options(stream=True).stream.remote(messages, api_key=self.key, model=MODEL, **options)
        try:
            async for chunk in stream:
                yield chunk["choices"][0]["delta"].get("content") or ""
        finally:
            stream.cancel()  # Serve misses it when the caller is left while it yields (seen once, on a busy machine)

    async def error(self, method: str, **call: Any) -> tuple[Any, ...]:
        """What a wrong call raises here."""
        try:
            await getattr(self.plain, method).remote(**call)
        except ServeAppError as error:
            return type(error).__name__, error.status, error.code, error.param, error.message
        return ()

    async def by_client(self, messages: list[Any], **options: Any) -> str:
        answer = await self.llm.chat(messages, **options)
        return answer.choices[0].message.content or ""

    async def stream_by_client(self, messages: list[Any], **options: Any) -> AsyncIterator[str]:
        async for chunk in self.llm.stream(messages, **options):
            yield chunk.choices[0].delta.content or ""

    async def sync_in_a_thread(self, messages: list[Any]) -> str:
        answer = await asyncio.to_thread(self.llm.sync.chat, messages, max_tokens=4)
        return answer.choices[0].message.content or ""

    async def sync_in_the_loop(self, messages: list[Any]) -> str:
        try:
            self.llm.sync.chat(messages, max_tokens=4)
        except RuntimeError as error:
            return str(error)
        return ""


def build(api_key: str) -> Application:
    return Caller.bind(api_key)
