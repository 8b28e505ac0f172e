"""The counts of a minute by model, class, tenant and name, as one router has them, and their plain form.

A request counts in the minute of its arrival as an arrival, and in the minute of its end with its outcome and all else.
Only the end is counted by the name that was asked for, if it is no model's own. The run of a shadow counts for its
model alone.

Invariant: what is in plain form can be added up in any order and in any parts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from serve_app.core.receipts import Receipt
from serve_app.types import Outcome

MINUTE_S = 60
COUNTS = (
    "arrivals",
    "ok",
    "refused",
    "failed",
    "cancelled",
    "bad_request",
    "prompt_tokens",
    "output_tokens",
    "left",  # requests to a name of `routes` that left this model for the next one
)
OUTCOMES = COUNTS[1:6]
_COUNT_OF = {
    Outcome.OK: "ok",
    Outcome.REFUSED: "refused",
    Outcome.ENGINE_FAILED: "failed",
    Outcome.INTERNAL_ERROR: "failed",
    Outcome.CANCELLED_QUEUED: "cancelled",
    Outcome.CANCELLED_RUNNING: "cancelled",
    Outcome.BAD_REQUEST: "bad_request",
    Outcome.UNAUTHORIZED: "bad_request",
}


class Sketch(Protocol):
    """Quantiles of durations that can be merged."""

    def add(self, seconds: float) -> None:
        """Count a duration."""

    def merge(self, plain: Sequence[int]) -> None:
        """Add what another one has counted."""

    def plain(self) -> list[int]:
        """What it has counted; empty: nothing."""

    def quantile(self, part: float) -> float | None:
        """The duration that this part of all is not above; None: there are none."""


MakeSketch = Callable[[], Sketch]


class Grouping(enum.StrEnum):
    """What a history has a row for."""

    TOTAL = "total"
    CLASS = "class"
    MODEL = "model"
    TENANT = "tenant"
    NAME = "name"  # that was asked for


class Group(NamedTuple):
    """The requests that are counted together.

    Args:
        tenant: its label, `other` for those without a name.
        asked_model: the name that they asked for; empty: their model's own.
    """

    model: str
    request_class: str
    tenant: str
    asked_model: str = ""

    def name(self, by: Grouping) -> str:
        """The name of its row."""
        match by:
            case Grouping.TOTAL:
                return by.value
            case Grouping.CLASS:
                return self.request_class
            case Grouping.MODEL:
                return self.model
            case Grouping.TENANT:
                return self.tenant
            case Grouping.NAME:
                return self.asked_name

    @property
    def asked_name(self) -> str:
        return self.asked_model or self.model


@dataclass(slots=True)
class Counts:
    """The counts of a group.

    Args:
        counts: by `COUNTS`. waits: seconds by reason.
        first_token, request, wait: the durations of requests that ran.
    """

    first_token: Sketch
    request: Sketch
    wait: Sketch
    counts: list[int] = field(default_factory=lambda: [0] * len(COUNTS))
    waits: dict[str, float] = field(default_factory=dict)

    @classmethod
    def empty(cls, make: MakeSketch) -> Counts:
        return cls(make(), make(), make())

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[COUNTS.index(name)] += amount

    def add(self, receipt: Receipt) -> None:
        """Count an ended request."""
        self.count(_COUNT_OF[receipt.outcome])
        self.count("prompt_tokens", receipt.prompt_tokens or 0)
        self.count("output_tokens", receipt.output_tokens or 0)
        for reason, waited_s in receipt.waits.items():
            self.waits[reason] = self.waits.get(reason, 0.0) + waited_s
        if receipt.first_token_s is not None:
            self.first_token.add(receipt.first_token_s)
        if receipt.granted and receipt.outcome is Outcome.OK:
            self.request.add(receipt.total_s)
        if receipt.outcome is not Outcome.BAD_REQUEST:
            self.wait.add(receipt.wait_s)

    def merge(self, plain: Mapping[str, Any]) -> None:
        """Add others in plain form."""
        for index, count in enumerate(plain["n"]):
            self.counts[index] += count
        for reason, waited_s in plain["w"].items():
            self.waits[reason] = self.waits.get(reason, 0.0) + waited_s
        for own, other in zip(self._sketches, plain["s"], strict=True):
            own.merge(other)

    def plain(self) -> dict[str, Any]:
        waits = {reason: round(waited_s, 6) for reason, waited_s in self.waits.items()}
        return {"n": self.counts, "w": waits, "s": [sketch.plain() for sketch in self._sketches]}

    @property
    def _sketches(self) -> tuple[Sketch, Sketch, Sketch]:
        return self.first_token, self.request, self.wait
