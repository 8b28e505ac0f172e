"""Receipts: what happened to each request, kept for later questions: `serve-app explain ID`, `GET /admin/requests/ID`.

Invariant: at most `limit` receipts are kept, each of bounded size; the oldest is dropped first. A receipt contains no
text of a prompt or an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from serve_app.core.receipts.slo import SloVerdict
from serve_app.core.receipts.trace import MAX_TEXT_CHARS, RequestTrace
from serve_app.types import Outcome, RequestClass

MAX_RECEIPTS = 10_000  # 14 MB; half an hour at 5 requests per second: questions come soon
LIMIT_WAIT = "limit"  # the reason of a wait for a limit of the key or tenant, beside those of `WaitReason`
# Which vLLM, or our adapter of it, puts before our id in the object's id.
OBJECT_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "embd-", "score-")
# The order in which a receipt has always told its fields; a new one comes after them.
_JSON_NAMES = (
    "request_id request_class tenant model outcome arrived wait_s total_s granted ahead waited_for first_token_s"
    " replica_id route losses preempted moved router_losses continued not_continued sequences slots estimated_prompt"
    " estimated_output source prompt_tokens output_tokens kv_token_s client_id refused retry_after_s deadline_s itl_s"
    " longest_gap_s slo ttft_slo_s itl_slo_s limit_wait_s"
)
_JSON_ORDER = tuple(_JSON_NAMES.split())


@dataclass(frozen=True, slots=True)
class Receipt:
    """One request, from arrival to end.

    Args:
        arrived: moment on the host's monotonic clock; all durations below count from it, in seconds.
        wait_s: until it was last handed to a replica, or until the end if it never was; reading the body and earlier
            attempts count.
        granted: whether it was ever granted.
        client_id: the id that the client (`X-Request-Id`) or HAProxy gave it; need not be unique.
        first_token_s: until the first token; None: there was none.
        total_s: until the end.
        prompt_tokens: counted by the engine; None: it did not run.
        refused: the reason of a refusal, the code of its error; `retry_after_s`: as sent to the client.
        deadline_s: as the client set it.
        itl_s: mean time between tokens; None: unknown. `longest_gap_s`: of a stream, between two frames with tokens.
        slo: the verdict on its service level (`ttft_slo_s`, `itl_slo_s`); None: its class has none.
        waits: seconds by reason: a `WaitReason`, or `LIMIT_WAIT`. Of a list of prompts, of all its prompts together.
        key_id: of its key; of a token `jwt:` and its subject.
        session_id: which its requests share, as the client named it.
        trace: what happened on its way; kept as a copy of bounded size.
    """

    request_id: str
    request_class: RequestClass
    tenant: str
    model: str
    outcome: Outcome
    arrived: float
    wait_s: float
    total_s: float
    granted: bool = False
    first_token_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    client_id: str | None = None
    refused: str | None = None
    retry_after_s: float | None = None
    deadline_s: float | None = None
    itl_s: float | None = None
    longest_gap_s: float | None = None
    slo: SloVerdict | None = None
    ttft_slo_s: float | None = None
    itl_slo_s: float | None = None
    waits: Mapping[str, float] = field(default_factory=dict)
    key_id: str = ""
    session_id: str | None = None
    trace: RequestTrace = field(default_factory=RequestTrace)

    def __post_init__(self) -> None:
        for name in ("request_id", "client_id", "tenant", "model", "key_id", "session_id"):
            text = getattr(self, name)
            if text is not None and len(text) > MAX_TEXT_CHARS:
                object.__setattr__(self, name, text[:MAX_TEXT_CHARS])
        object.__setattr__(self, "trace", self.trace.bounded())

    def to_json_fields(self) -> dict[str, Any]:
        """The fields as JSON values, those of the trace among them: classes by label."""
        values = self.json_values()
        return {name: values[name] for name in _JSON_ORDER} | values

    def json_values(self) -> dict[str, Any]:
        """As `to_json_fields`, in any order: for a record of each request that ends."""
        values = dict(zip(_OWN_NAMES, _own_values(self), strict=True))
        values["request_class"] = self.request_class.label
        return values | self.trace.to_json_fields()

    @classmethod
    def from_json_fields(cls, values: Mapping[str, Any]) -> Receipt:
        """The receipt that has these fields, in what `to_json_fields` shows of one."""
        plain = {one.name for one in fields(cls)} - {"request_class", "outcome", "slo", "trace"}
        return cls(
            request_class=RequestClass[values["request_class"].upper()],
            outcome=Outcome(values["outcome"]),
            slo=None if values["slo"] is None else SloVerdict(values["slo"]),
            trace=RequestTrace.from_json_fields(values),
            **{name: values[name] for name in plain},
        )


_OWN_NAMES = tuple(one.name for one in fields(Receipt) if one.name != "trace")
_own_values = attrgetter(*_OWN_NAMES)


def bare_id(request: str) -> str:
    """A request's id without what the id of an answer's object puts before it."""
    return next((request.removeprefix(one) for one in OBJECT_PREFIXES if request.startswith(one)), request)


class Receipts:
    """The latest receipts by request id or client id. Every method is O(1)."""

    def __init__(self, limit: int = MAX_RECEIPTS) -> None:
        self._limit = limit
        self.kept: OrderedDict[str, Receipt] = OrderedDict()
        # The latest receipt by client id, of each tenant and (None) of all: clients choose equal ids.
        self.by_client: dict[tuple[str | None, str], Receipt] = {}

    def add(self, receipt: Receipt) -> None:
        """Keep a receipt; it replaces one with the same id."""
        if receipt.request_id in self.kept:
            self._forget(self.kept.pop(receipt.request_id))
        self.kept[receipt.request_id] = receipt
        if receipt.client_id:
            for tenant in (None, receipt.tenant):
                self.by_client[tenant, receipt.client_id] = receipt
        if len(self.kept) > self._limit:
            self._forget(self.kept.popitem(last=False)[1])

    def find(self, request_id: str, tenant: str | None) -> Receipt | None:
        """Find by our id, the OpenAI object's id, or the client's. None: there was none, it is no longer kept, or it is
        not of `tenant` (None: all tenants')."""
        wanted = request_id[:MAX_TEXT_CHARS]
        found = self.kept.get(wanted) or self.kept.get(bare_id(wanted))
        if found is not None and tenant in (None, found.tenant):
            return found
        return self.by_client.get((tenant, wanted))

    def _forget(self, receipt: Receipt) -> None:
        for tenant in (None, receipt.tenant):
            key = (tenant, receipt.client_id or "")
            if self.by_client.get(key) is receipt:
                del self.by_client[key]
