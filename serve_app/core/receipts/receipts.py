"""What became of a request, kept for whoever asks later: `serve-app explain ID`, `GET /admin/requests/ID`.

Invariant: no more receipts than the bound are kept, each of bounded size; the oldest go first. No text of a request or
an answer is in one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

from serve_app.core.estimate import Source
from serve_app.core.queue import Reason
from serve_app.core.receipts.slo import Verdict
from serve_app.core.routing import Route
from serve_app.types import Outcome, RequestClass

MAX_RECEIPTS = 10_000  # 9 MB; at 5 requests a second half an hour, and who asks asks soon
MAX_TEXT_CHARS = 256  # of an id or a name; ours are shorter
OBJECT_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "embd-")  # what vLLM sets before our id in the object's


@dataclass(frozen=True, slots=True)
class Receipt:
    """One request, from arrival to end.

    Args:
        arrived: moment on the host's monotonic clock; all spans below count from it, in seconds.
        wait_s: until it was granted, or until it ended without.
        granted: whether it ever got a place.
        ahead: requests that stood before it in the line when it came, by class.
        client_id: what the client calls it (`X-Request-Id`), or what HAProxy did; need not be unique.
        first_token_s: until the first token; None: there was none.
        total_s: until the end.
        replica_id: where it ran last, if anywhere; `route` is why there.
        losses: replicas that were lost under it.
        sequences: how many it ran at once, in so many `slots` of the replica's batch: more where they are long.
        estimated_prompt: tokens, as `estimated_output` for all answers; `source` is what the latter was learned from.
        prompt_tokens: as the engine counted them; None: it did not get so far.
        kv_token_s: tokens of KV cache held, times seconds.
        refused: the reason, where it was refused; `retry_after_s` is what the client was told.
        deadline_s: the client's.
        itl_s: between tokens, the mean; None: it cannot be told. `longest_gap_s` is between two frames with tokens.
        slo: how it was served, where its class has a level, which is `ttft_slo_s` and `itl_slo_s`.
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
    first_token_s: float | None = None
    replica_id: str | None = None
    route: Route | None = None
    losses: int = 0
    sequences: int = 0
    slots: int = 0
    estimated_prompt: int = 0
    estimated_output: int = 0
    source: Source = Source.PRIOR
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    kv_token_s: float = 0.0
    client_id: str | None = None
    refused: Reason | None = None
    retry_after_s: float | None = None
    deadline_s: float | None = None
    itl_s: float | None = None
    longest_gap_s: float | None = None
    slo: Verdict | None = None
    ttft_slo_s: float | None = None
    itl_slo_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("request_id", "client_id", "tenant", "model", "replica_id"):
            text = getattr(self, name)
            if text is not None and len(text) > MAX_TEXT_CHARS:
                object.__setattr__(self, name, text[:MAX_TEXT_CHARS])
        object.__setattr__(self, "ahead", self.ahead[: len(RequestClass)])

    def plain(self) -> dict[str, Any]:
        """The fields, ready for JSON: classes by label."""
        found: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        found["request_class"] = self.request_class.label
        found["ahead"] = {who.label: count for who, count in self.ahead}
        return found


class Receipts:
    """The latest receipts by request id, or by the client's. Every method is O(1)."""

    def __init__(self, most: int = MAX_RECEIPTS) -> None:
        """ValueError: `most` is below 1."""
        if most < 1:
            raise ValueError(f"most is {most}")
        self._most = most
        self._kept: OrderedDict[str, Receipt] = OrderedDict()
        self._by_client: dict[str, str] = {}  # the last request that a client called so

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, receipt: Receipt) -> None:
        """Keep a receipt; of two with one id the later one stays."""
        self._forget(self._kept.pop(receipt.request_id, None))
        self._kept[receipt.request_id] = receipt
        if receipt.client_id:
            self._by_client[receipt.client_id] = receipt.request_id
        if len(self._kept) > self._most:
            self._forget(self._kept.popitem(last=False)[1])

    def find(self, request_id: str) -> Receipt | None:
        """By our id, the OpenAI object's, or the client's. None: there was none, or it is no longer kept."""
        wanted = request_id[:MAX_TEXT_CHARS]
        bare = next((wanted.removeprefix(one) for one in OBJECT_PREFIXES if wanted.startswith(one)), wanted)
        for name in (wanted, bare, self._by_client.get(wanted, "")):
            if (found := self._kept.get(name)) is not None:
                return found
        return None

    def _forget(self, receipt: Receipt | None) -> None:
        client_id = None if receipt is None else receipt.client_id
        if receipt is not None and client_id and self._by_client.get(client_id) == receipt.request_id:
            del self._by_client[client_id]
