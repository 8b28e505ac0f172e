"""The messages between a router and an engine replica, and the protocol of an engine backend.

A router holds one *channel* per engine replica: one connection that carries its requests (`Submit`) there, and back
`Batch` messages with the frames of all of them.

Invariant: the frames of one request arrive in order, the first with a status, the last with `usage` or `failure`; the
frame that tells the first token of a whole answer comes before them. A `Batch` is applied as a whole or not at all: all
events of one pull of the serving object leave in one turn of the event loop. So after each message another engine can
continue a stream: it makes all groups received so far again and drops as many events as were counted with them
(docs/decisions/routing-and-continuity.md).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
from prometheus_client.metrics_core import Metric

from serve_app.errors import EngineFailed, EngineUnreachable, RequestFailed, ServeAppError
from serve_app.types import Operation


def _in_order(self: msgspec.Struct) -> tuple[Any, ...]:
    """Pickle a Struct so that a release with fewer or more fields reads it (`core.messages`, which is for other
    classes): as MessagePack does, by the order of the fields."""
    return msgspec.convert, (msgspec.structs.astuple(self), type(self))


class Submit(msgspec.Struct, frozen=True, array_like=True):
    """One request submitted to an engine replica.

    `number` is unique in the channel; `request_id` becomes the OpenAI object's id; `body` is the decoded OpenAI request
    without the fields of our own contract; `priority` is vLLM's (lower runs sooner); `slots` is how many sequences the
    request takes in the engine's batch; `service_tier` is told back in the answer (None: the client named none).
    `prompt_tokens` and `output_tokens` are the router's estimate of its prompts and answers together (0: unknown).
    `created`: the time in the answer, in seconds since the epoch (0: the engine's own clock). `groups` and `events`: of
    a stream that is continued here, the groups of its earlier runs in order, and the events that the client has;
    the frames of this run hold and count what follows, `usage` is that of the whole answer. An answer that is no stream
    is continued in the same way, with 0 `events`. `cached_tokens`: those that its first run had in `prompt`. What the
    replica cannot continue exactly ends with a failure, code `NOT_CONTINUABLE`. `accepted`: it had a replica before, so
    that no full queue refuses it. `is_load`: it counts for the number of replicas. `fingerprint`: of the replica of the
    earlier runs (`Batch`); None: there is none, or it has told none. `query_counted`: an earlier part of this score has
    counted the tokens of its one query. `is_large`: as its router has measured it (`core.body_bounds`);
    None: it has not. `traceparent`: the request's span in its trace, for log records; vLLM's own tracing stays off.
    `shown_model`: `model` of the answer, where its client knows the model by another name; empty: the model's own.
    """

    number: int
    request_id: str
    operation: Operation
    body: dict[str, Any]
    priority: int = 0
    cache_salt: str | None = None
    slots: int = 1
    service_tier: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    created: int = 0
    groups: list[list[int]] = []
    events: int = 0
    cached_tokens: int = 0
    accepted: bool = False
    is_load: bool = True
    fingerprint: str | None = None
    query_counted: bool = False
    is_large: bool | None = None
    traceparent: str = ""
    shown_model: str = ""


NOT_CONTINUABLE = "not_continuable"  # code of the failure of an answer that the replica cannot continue exactly
# Code of the failure of a request that its router has stopped, to continue elsewhere or later.
STOPPED = "stopped"
FINISH_STOP = "stop"  # the finish reason of an answer that ended by itself; any other means that it was cut off


class TokenUsage(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a request used; `prompt_tokens` include the cached ones. `finish_reason` is `FINISH_STOP` if all
    of its answers have ended so."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a request ended on the replica without a whole answer: `EngineFailed`, or `RequestFailed` if the engine
    lives, and another one would fail in the same way."""

    message: str
    code: str = EngineFailed.code
    retry_after_s: float | None = None

    def error(self) -> ServeAppError:
        """The error, as the replica raised it."""
        if self.code == RequestFailed.code:
            return RequestFailed(self.message)
        kind = EngineUnreachable if self.code == EngineUnreachable.code else EngineFailed
        return kind(self.message, code=self.code, retry_after_s=self.retry_after_s)


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a response.

    `status` is the HTTP status on a request's first frame and 0 on all others; `media`, on the first frame, is "sse",
    "json" or "text"; `body` is ready bytes (whole SSE events, or a part of a document) and `events` is how many pieces
    vLLM's serving object yielded for them; `groups` are the token groups pulled so far and not sent before, each
    `[choice, token, token, ...]`; `usage` marks the last frame of a whole answer, `failure` that of a broken one;
    `prompt`, on the first frame of a stream, has the tokens of the prompt, for an answer that is cut off; so has the
    last one of a whole answer that was stopped, and `groups` then what it has produced. A whole answer has a frame with
    `prompt` alone before all others, sent with its first token. `retry_after_s`: of a refusal that a repeat may not
    meet.
    """

    number: int
    body: bytes
    status: int = 0
    media: str = ""
    groups: list[list[int]] = []
    events: int = 0
    usage: TokenUsage | None = None
    failure: Failure | None = None
    prompt: TokenUsage | None = None
    retry_after_s: float | None = None

    @property
    def tells_first_token(self) -> bool:
        """Whether it only says that a whole answer has its first token."""
        return self.prompt is not None and not self.status and self.failure is None


class Unsent(NamedTuple):
    """What `EngineBackend.produced` gives: token groups, and the tokens of the prompt."""

    groups: list[list[int]]
    prompt: TokenUsage | None = None


# Takes the id of a request, and the tokens of its prompt.
FirstTokenReport = Callable[[str, TokenUsage], None]

NO_SLOTS = -1


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One message of a channel. `slots` is how many sequences one step of the replica can run; 0: unchanged;
    `NO_SLOTS`: the replica drains and takes no more requests; those that run finish within `drain_s`, or
    continue elsewhere (None: a replica that does not say). `fingerprint`, with `slots`: what this replica has begun
    continues at replicas with the same one (`serve_app.engine.start.fingerprint`); None: it does not say. `operations`,
    with `slots`: which the replica knows; None: it does not say, as those of a release that knows
    `FIRST_OPERATIONS`."""

    frames: list[Frame]
    slots: int = 0
    drain_s: float | None = None
    fingerprint: str | None = None
    operations: list[str] | None = None  # no enum: a later release has others


class EngineInfo(msgspec.Struct, frozen=True, array_like=True):
    """The limits of a started engine. Sizes in tokens; `slots`: sequences that one step can run besides those of agent
    sessions; `start_s`: seconds that the start took; `kv_block_tokens`: the block size of the KV cache; `continues`:
    whether it can continue a stream of another replica (`Submit.groups`)."""

    model: str
    tasks: list[str]
    max_model_len: int
    slots: int
    kv_cache_tokens: int
    kv_cache_bytes: int
    start_s: float = 0.0
    kv_block_tokens: int = 1
    continues: bool = False
    __reduce__ = _in_order


class TcpAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address of a replica's TCP server, and a ticket for it, valid once and for seconds (`TICKET_LIFE_S`)."""

    host: str
    port: int
    ticket: bytes
    __reduce__ = _in_order


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """Live use of an engine: sequences running and waiting inside it, share of KV blocks in use (0..1), counters.

    `waiting` includes the requests that wait for a batch. `sequence_steps` adds up the sequences of all steps.
    `prompt_tokens` counts each prompt once; `prefilled_tokens` what was computed before a sequence's next token: its
    prompt and what it had produced elsewhere, less cache hits (0: an engine without a prefix cache). The rest comes
    from `serve_app.engine.batched_engine`: `batch_size` is the mean requests of a batch, or the mean sequences of a
    step where the engine batches by itself; `batch_wait_s` the mean wait of a request for its batch; `padding_ratio`
    the mean share of a batch that is padding, by the tokens its requests used (0: the engine batches by itself);
    `tokens_per_s` prompt and output tokens; `batches` and `batched_requests` count what has started.
    """

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    sequence_steps: int = 0
    batch_size: float = 0.0
    batch_wait_s: float = 0.0
    padding_ratio: float = 0.0
    tokens_per_s: float = 0.0
    batches: int = 0
    batched_requests: int = 0
    prefilled_tokens: int = 0
    __reduce__ = _in_order


# An engine's own metrics as a part of an exposition, by family: its HELP and TYPE, and its samples.
EngineTexts = Mapping[str, tuple[bytes, bytes]]


class EngineBackend(Protocol):
    """An engine behind an engine replica: vLLM, or the simulated one."""

    async def start(self) -> EngineInfo:
        """Load the model; returns when requests can run. Raises on failure; the replica then dies with the reason."""

    def run(self, submit: Submit) -> AsyncGenerator[Frame, None]:
        """Run one request: the frames with its number. The first one carries the status, the last one `usage`.

        Closing the iterator (or cancelling the task that consumes it) aborts the request inside the engine. Client
        errors are frames with a 4xx status and an OpenAI error body; only failures of the engine itself raise.
        """

    def produced(self, submit: Submit) -> Unsent:
        """What a running request has produced so far and no frame has yet told: of an answer that is no stream, all
        since the start of this run, as far as that can be continued."""

    def report_first_tokens(self, report: FirstTokenReport) -> None:
        """Call `report` from now on when an answer that is no stream has its first token; a stream's first frame tells
        it. An answer that ends with its first token, or is continued here, may come without."""

    def load(self) -> EngineLoad:
        """The newest live figures, without a round trip to the engine."""

    def own_metrics(self) -> Iterable[Metric]:
        """The metrics that the engine itself counts, as families of `prometheus_client`. Called in a thread."""

    @property
    def alive(self) -> bool:
        """False once the engine is permanently dead; the replica must then end."""

    async def check_health(self) -> None:
        """Raise when the engine is dead or frozen."""

    def kill(self) -> None:
        """End every process of the engine at once, frozen ones too."""

    async def shutdown(self) -> None:
        """Stop the engine and all its processes; returns when they are gone."""


batch_encoder = msgspec.msgpack.Encoder()
batch_decoder = msgspec.msgpack.Decoder(Batch)
