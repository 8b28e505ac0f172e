"""One call of an engine operation: what limits, keyed runs, lists of prompts and comments of the queue wrap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve_app.core.limits import LimitedRequest
from serve_app.core.names import ModelHops, ModelRoute
from serve_app.core.receipts import RequestMeasure
from serve_app.http.body import HeaderMap
from serve_app.http.prompt_list import PromptExchange
from serve_app.http.queue_status import QueueComments
from serve_app.http.request_record import RequestRecord
from serve_app.http.response import HttpExchange
from serve_app.http.responses import Turn
from serve_app.http.split_body import SplitBody
from serve_app.router import ModelRouter
from serve_app.types import Contract, Identity, Operation


@dataclass(slots=True)
class AskedCall:
    """A request as its client sent it, from which the call of each model that it may run on is made.

    Args:
        sent: the body, with the whole conversation that it continues; `sent_bytes`: its size.
        hops: those models. route: of the name that was sent; None: it is the model's own.
        turn: of a conversation that the server keeps.
    """

    operation: Operation
    identity: Identity
    headers: HeaderMap
    sent: dict[str, Any]
    sent_bytes: int
    hops: ModelHops
    route: ModelRoute | None = None
    turn: Turn | None = None


@dataclass(slots=True)
class EngineCall:
    """A request for an engine, once its body has been read."""

    asked: AskedCall
    record: RequestRecord
    contract: Contract
    split: SplitBody
    body: dict[str, Any]  # the whole, or a part of a list of prompts
    measure: RequestMeasure  # of that
    model: ModelRouter
    exchange: HttpExchange
    comments: QueueComments | None
    charge: LimitedRequest
    part: PromptExchange | None = None  # of a list of prompts
    on_granted: Callable[[], None] | None = None  # of such a part
