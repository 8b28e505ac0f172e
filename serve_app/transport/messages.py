"""What a router and an engine replica say to each other, and what an engine backend is.

A router holds one *channel* per engine replica: a long-lived stream of `Batch` messages with the frames of all its
requests. Requests are handed in by a unary call (`Submit`) that stays open until the request ends, so that Serve's own
count of ongoing requests, its drain and its cancellation stay true; cancelling that call aborts the request.

Invariant: the frames of one request arrive in order, the first with a status, the last with `usage`. A `Batch` is taken
whole or not at all: all events that follow one pull of the serving object leave in one turn of the event loop, so after
each message, replaying its groups and those before it and dropping as many events as they counted continues the stream
(docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from serve_app.types import Operation


class Submit(msgspec.Struct, frozen=True, array_like=True):
    """One request handed to an engine replica.

    `number` is unique in the channel; `request_id` becomes the OpenAI object's id; `body` is the decoded OpenAI request
    without any field of our contract; `priority` is vLLM's (lower runs sooner); `slots` is how many sequences the
    request occupies in the engine's batch.
    """

    number: int
    request_id: str
    operation: Operation
    body: dict[str, Any]
    priority: int = 0
    cache_salt: str | None = None
    slots: int = 1


ENDED = "stop"  # the finish reason of an answer that was left to end by itself; by any other it was cut off


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """What a request used, in tokens. `finish_reason` is `ENDED` if all of its answers have ended so."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a response.

    `status` is the HTTP status on a request's first frame and 0 on all others, `media` beside it is "sse" or "json";
    `body` is ready bytes (whole SSE events, or a part of a JSON document) and `events` how many pieces vLLM's serving
    object yielded for them; `groups` are the token groups pulled so far and not sent before, each
    `[choice, token, token, ...]`; `usage` marks the last frame.
    """

    number: int
    body: bytes
    status: int = 0
    media: str = ""
    groups: list[list[int]] = []
    events: int = 0
    usage: Usage | None = None


NO_SLOTS = -1


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One message of a channel. `slots` is how many sequences one step of the replica can run; 0 means unchanged,
    `NO_SLOTS` that it takes no request any more: it drains."""

    frames: list[Frame]
    slots: int = 0


class EngineInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a started engine can do. Sizes in tokens; `slots` is the number of sequences one step can run beside those
    of agent sessions, `start_s` the seconds it took to start, `kv_block_tokens` what the KV cache is given out in."""

    model: str
    tasks: list[str]
    max_model_len: int
    slots: int
    kv_cache_tokens: int
    kv_cache_bytes: int
    start_s: float = 0.0
    kv_block_tokens: int = 1


class WireAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a router connects to, and the ticket to show there, good once and for seconds."""

    host: str
    port: int
    ticket: bytes


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """Live use of an engine: sequences running and waiting inside it, share of KV blocks in use (0..1), counters."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What a backend yields for one request, before the channel numbers it: see `Frame` for the fields."""

    body: bytes
    status: int = 0
    media: str = ""
    groups: list[list[int]] = []
    usage: Usage | None = None


class EngineBackend(Protocol):
    """An engine behind an engine replica: vLLM, or the simulated one."""

    async def start(self) -> EngineInfo:
        """Load the model; returns when requests can run. Raises on failure; the replica then dies with the reason."""
        ...

    def run(self, submit: Submit) -> AsyncGenerator[Piece, None]:
        """Run one request. The first piece carries the status, the last one `usage`.

        Closing the iterator (or cancelling the task that consumes it) aborts the request inside the engine. Client
        errors are pieces with a 4xx status and an OpenAI error body; only failures of the engine itself raise.
        """
        ...

    def load(self) -> EngineLoad:
        """The newest live figures, without a round trip to the engine."""
        ...

    @property
    def alive(self) -> bool:
        """False once the engine is dead for good; the replica is then of no use any more."""
        ...

    async def check_health(self) -> None:
        """Raise when the engine is dead or frozen."""
        ...

    def kill(self) -> None:
        """End every process of the engine at once, frozen ones too."""
        ...

    async def shutdown(self) -> None:
        """Stop the engine and every process of it; returns when they are gone."""
        ...


batch_encoder = msgspec.msgpack.Encoder()
batch_decoder = msgspec.msgpack.Decoder(Batch)
