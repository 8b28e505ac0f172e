"""Receipts: what happened to each request, kept for later questions: `serve-app explain ID`, `GET /admin/requests/ID`.

Invariant: at most `limit` receipts are kept, each of bounded size; the oldest is dropped first. A receipt contains no
text of a prompt or an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

from serve_app.core.continuation import NotContinued
from serve_app.core.estimate import EstimateSource
from serve_app.core.queue import WaitReason
from serve_app.core.receipts.slo import SloVerdict
from serve_app.core.routing import Route
from serve_app.types import Outcome, RequestClass

MAX_RECEIPTS = 10_000  # 9 MB; half an hour at 5 requests per second: questions come soon
MAX_CONTINUED = 8  # the prompts of a list have more than one stream, which has two at most
MAX_TEXT_CHARS = 256  # of an id or a name; those that this system makes are shorter
OBJECT_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "embd-", "score-")  # which vLLM puts before our id in the object's id


@dataclass(frozen=True, slots=True)
class Receipt:
    """One request, from arrival to end.

    Args:
        arrived: moment on the host's monotonic clock; all durations below count from it, in seconds.
        wait_s: until it was last handed to a replica, or until the end if it never was; reading the body and earlier
            attempts count.
        limit_wait_s: of these, aside, until a limit of its key or tenant let it into the queue.
        granted: whether it was ever granted.
        ahead: requests of its class and above, of all tenants, that waited when it arrived, by class.
        waited_for: what kept it waiting in the queue before its last grant; None: nothing, or it was not granted.
        client_id: the id that the client (`X-Request-Id`) or HAProxy gave it; need not be unique.
        first_token_s: until the first token; None: there was none.
        total_s: until the end.
        replica_id: the replica it ran on last, if any; `route`: the rule that chose it.
        losses: replicas that were lost while it ran on them; `router_losses`: earlier runs under its Idempotency-Key
            that were lost with their router.
        continued: the replicas on which its stream went on after a loss, with the seconds until it did;
            `not_continued`: why the last loss ended it.
        sequences: sequences run at once; `slots`: slots of the replica's batch that they took, more if they are long.
        estimated_prompt: tokens; `estimated_output`: tokens of all answers; `source`: the latter was learned from it.
        prompt_tokens: counted by the engine; None: it did not run.
        kv_token_s: tokens of KV cache held, times seconds.
        refused: the reason of a refusal, the code of its error; `retry_after_s`: as sent to the client.
        deadline_s: as the client set it.
        itl_s: mean time between tokens; None: unknown. `longest_gap_s`: of a stream, between two frames with tokens.
        slo: the verdict on its service level (`ttft_slo_s`, `itl_slo_s`); None: its class has none.
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
    ahead: tuple[tuple[RequestClass, int], ...] = ()
    waited_for: WaitReason | None = None
    first_token_s: float | None = None
    replica_id: str | None = None
    route: Route | None = None
    losses: int = 0
    preempted: int = 0
    moved: int = 0
    router_losses: int = 0
    continued: tuple[tuple[str, float], ...] = ()
    not_continued: NotContinued | None = None
    sequences: int = 0
    slots: int = 0
    estimated_prompt: int = 0
    estimated_output: int = 0
    source: EstimateSource = EstimateSource.PRIOR
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    kv_token_s: float = 0.0
    client_id: str | None = None
    refused: str | None = None
    retry_after_s: float | None = None
    deadline_s: float | None = None
    itl_s: float | None = None
    longest_gap_s: float | None = None
    slo: SloVerdict | None = None
    ttft_slo_s: float | None = None
    itl_slo_s: float | None = None
    limit_wait_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("request_id", "client_id", "tenant", "model", "replica_id"):
            text = getattr(self, name)
            if text is not None and len(text) > MAX_TEXT_CHARS:
                object.__setattr__(self, name, text[:MAX_TEXT_CHARS])
        object.__setattr__(self, "ahead", self.ahead[: len(RequestClass)])
        continued = tuple((name[:MAX_TEXT_CHARS], gap_s) for name, gap_s in self.continued[:MAX_CONTINUED])
        object.__setattr__(self, "continued", continued)

    def to_json_fields(self) -> dict[str, Any]:
        """The fields as JSON values: classes by label."""
        ahead = {who.label: count for who, count in self.ahead}
        return asdict(self) | {"request_class": self.request_class.label, "ahead": ahead}


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
        bare = next((wanted.removeprefix(one) for one in OBJECT_PREFIXES if wanted.startswith(one)), wanted)
        found = self.kept.get(wanted) or self.kept.get(bare)
        if found is not None and tenant in (None, found.tenant):
            return found
        return self.by_client.get((tenant, wanted))

    def _forget(self, receipt: Receipt) -> None:
        for tenant in (None, receipt.tenant):
            key = (tenant, receipt.client_id or "")
            if self.by_client.get(key) is receipt:
                del self.by_client[key]
