"""What the store keeps and is asked, as values: keys, and questions about use. They cross process boundaries.

Use itself is in `core.usage`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from serve_app.core.batches import BatchWork, RowCounts
from serve_app.core.limits import Limits
from serve_app.core.messages import message
from serve_app.core.usage import USAGE_KEY, InFlightUse
from serve_app.types import RequestClass

KEY_ID = re.compile("key_[0-9a-f]{16}")


def new_key_id() -> str:
    return f"key_{secrets.token_hex(8)}"


def is_key_id(text: str) -> bool:
    return KEY_ID.fullmatch(text) is not None


@message
@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key of the store. Times are seconds since 1970 UTC.

    Args:
        digest: SHA-256 of the key; the key itself is nowhere.
        previous_digest: of the key before a rotation, valid until `previous_until`.
        models: that it may use; None: all, or none with `metrics` alone (`usable_models`).
        limits: its own; None: the default ones of the configuration. `batch_limits`: of the rows of its batches.
        version: of the change that made it what it is; the store sets it.
    """

    key_id: str
    name: str
    tenant: str
    digest: bytes
    previous_digest: bytes | None = None
    previous_until: float | None = None
    max_class: RequestClass = RequestClass.HIGH
    default_class: RequestClass = RequestClass.NORMAL
    admin: bool = False
    metrics: bool = False
    models: tuple[str, ...] | None = None
    limits: Limits | None = None
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None
    version: int = 0
    batch_limits: Limits | None = None
    deploy: bool = False

    @property
    def usable_models(self) -> tuple[str, ...] | None:
        """The models that the key may use; None: all. A scraper's key names the models that it may use, too."""
        return () if self.models is None and self.metrics and not self.admin else self.models


@message
@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Which use, and by what it is summed: any of `USAGE_KEY`. Days are inclusive; None: all."""

    by: tuple[str, ...] = USAGE_KEY
    from_day: str | None = None
    to_day: str | None = None
    tenant: str | None = None
    key_id: str | None = None
    model: str | None = None
    asked_model: str | None = None


@message
@dataclass(frozen=True, slots=True)
class Used:
    """What one scope has used: `requests` with the unsettled ones, `tokens` of prompts and outputs."""

    requests: int = 0
    tokens: int = 0
    cost_micro: int = 0


@message
@dataclass(frozen=True, slots=True)
class StoreFigures:
    """What a scrape shows of the store.

    Args:
        work: the batches that have not ended, the oldest first.
        rows: of them, by model.
        bytes: of the database.
    """

    work: Sequence[BatchWork] = ()
    rows: Mapping[str, RowCounts] = field(default_factory=dict)
    bytes: int = 0


def in_flight_json(entries: tuple[InFlightUse, ...]) -> str:
    return json.dumps([asdict(entry) for entry in entries])


def in_flight_of(text: str) -> tuple[InFlightUse, ...]:
    return tuple(InFlightUse(**entry) for entry in json.loads(text))
