"""Frozen values that several packages share."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RequestClass(enum.IntEnum):
    """Priority classes; a higher number is served first (unlike vLLM's own field)."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    CRITICAL = 3

    @property
    def label(self) -> str:
        return self.name.lower()


# Names that a caller may use: the class names, common synonyms, and OpenAI's `service_tier` values.
CLASS_ALIASES: dict[str, RequestClass] = {
    **{c.label: c for c in RequestClass},
    "realtime": RequestClass.CRITICAL,
    "batch": RequestClass.LOW,
    "priority": RequestClass.HIGH,
    "default": RequestClass.NORMAL,
    "auto": RequestClass.NORMAL,
    "flex": RequestClass.LOW,
}


# The tier that an answer names: OpenAI has no word for the highest class.
SERVICE_TIERS: dict[RequestClass, str] = {
    RequestClass.LOW: "flex",
    RequestClass.NORMAL: "default",
    RequestClass.HIGH: "priority",
    RequestClass.CRITICAL: "priority",
}


class Outcome(enum.StrEnum):
    """How a request ended: exactly one outcome per request, a label of the metrics."""

    OK = "ok"
    BAD_REQUEST = "bad_request"
    UNAUTHORIZED = "unauthorized"
    REFUSED = "refused"
    CANCELLED_QUEUED = "cancelled_queued"
    CANCELLED_RUNNING = "cancelled_running"
    ENGINE_FAILED = "engine_failed"
    INTERNAL_ERROR = "internal_error"


class Operation(enum.StrEnum):
    """The operation of an engine; one value per route of vLLM's server that reaches an engine."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"  # Anthropic's, whose body a router translates to that of a chat
    EMBEDDING = "embedding"
    EMBED = "embed"  # Cohere's embeddings
    POOLING = "pooling"
    CLASSIFY = "classify"
    SCORE = "score"
    RERANK = "rerank"
    TRANSCRIPTION = "transcription"
    TRANSLATION = "translation"  # of speech, into English
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    INPUT_TOKENS = "input_tokens"  # of a response, counted
    MESSAGE_TOKENS = "message_tokens"  # of Anthropic's messages, counted
    TOKENIZER_INFO = "tokenizer_info"  # for operators

    @property
    def generates(self) -> bool:
        return self in (Operation.CHAT, Operation.COMPLETION, Operation.RESPONSES, Operation.MESSAGES)

    @property
    def is_anthropic(self) -> bool:
        """Whether its client speaks Anthropic's API: its answers, errors and headers have that form."""
        return self in (Operation.MESSAGES, Operation.MESSAGE_TOKENS)

    @property
    def has_chat_body(self) -> bool:
        """Whether an engine gets the body of a chat completion for it."""
        return self is Operation.CHAT or self.is_anthropic

    @property
    def is_scoring(self) -> bool:
        return self in (Operation.SCORE, Operation.RERANK)

    @property
    def is_pooling(self) -> bool:
        """Whether pooling models answer it: texts are read in one step each, and no token is generated."""
        texts = (Operation.EMBEDDING, Operation.EMBED, Operation.POOLING, Operation.CLASSIFY)
        return self in texts or self.is_scoring

    @property
    def hears(self) -> bool:
        """Whether it takes an audio file, in a form, and answers with the text of it."""
        return self in (Operation.TRANSCRIPTION, Operation.TRANSLATION)

    @property
    def takes_slot(self) -> bool:
        """Whether the operation occupies batch slots of the engine (tokenizing runs on the front end alone)."""
        return self.generates or self.is_pooling or self.hears


# Those of release 0.5.0, whose engine replicas do not say which operations they know.
FIRST_OPERATIONS = frozenset(
    (
        Operation.CHAT,
        Operation.COMPLETION,
        Operation.RESPONSES,
        Operation.EMBEDDING,
        Operation.TOKENIZE,
        Operation.DETOKENIZE,
        Operation.INPUT_TOKENS,
        Operation.TOKENIZER_INFO,
    )
)

TOKEN_PREFIX = "jwt:"  # of a token's subject, in place of a key's id: no key has an id that begins so


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller's identity and rights; the API key or the token alone decides them.

    Args:
        key_id: the key's name in reports of use and limits, or TOKEN_PREFIX and the subject of the token; never the key
            or all of its digest.
        models: names of the models that it may use; None: all.
        deploy: may change the running configuration, see `serve_app.settings.remote_changes`.
        is_row: it is a row of a batch of this key: of class `low`, and charged to its tenant's `batch_limits`.
        is_token: it is of a token, which ends within minutes or hours and is kept nowhere.
    """

    tenant: str
    max_class: RequestClass
    default_class: RequestClass
    admin: bool = False
    metrics: bool = False
    key_id: str = ""
    models: frozenset[str] | None = None
    is_row: bool = False
    deploy: bool = False
    is_token: bool = False

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    @property
    def reads_metrics_alone(self) -> bool:
        """Whether it is a scraper's: of no model, file or tenant."""
        return self.metrics and not self.admin and self.models == frozenset()


@dataclass(frozen=True, slots=True)
class Contract:
    """The client's options besides the OpenAI body; the ASGI app consumes them and never forwards them."""

    request_class: RequestClass
    session_id: str | None
    deadline_s: float | None
    idempotency_key: str | None
    replay_only: bool = False  # with an idempotency key: join a run or get its answer, and never run
    queue_status: bool = False  # of a stream: send its queue position while it waits
    grace_s: float | None = None  # for which a run with an idempotency key goes on after a disconnect
    service_tier: str | None = None  # OpenAI's word for the class, told back to a client that named a tier
