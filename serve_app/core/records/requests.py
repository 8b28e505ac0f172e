"""The record of an ended request, and which records answer a question.

Records of several routers and nodes are ordered by their arrival, the newest first; of two that arrived at once, by
their ids. A page ends with a cursor, and the next page begins behind it, whatever has been recorded since.

Invariant: a question of one tenant has no other tenant's record in its answer.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve_app.core.receipts import Receipt, bare_id
from serve_app.types import Outcome, RequestClass

FAILED = frozenset({Outcome.ENGINE_FAILED, Outcome.INTERNAL_ERROR})
DIGITS = 6  # of seconds in a record
# What a record has beside its receipt, and the receipt's fields that it leaves out where they are as here.
EMPTY: Mapping[str, Any] = {
    **Receipt("", RequestClass.NORMAL, "", "", Outcome.OK, 0.0, 0.0, 0.0).to_json_fields(),
    "router": "",
    "node": "",
    "prefix_blocks": [],
    "runs": [],
    "cached_tokens": 0,
    "operation": "",
    "is_row": False,
}
ALWAYS = frozenset({"request_id", "request_class", "tenant", "model", "outcome", "total_s"})

_LEFT_OUT: Mapping[str, Any] = dict(EMPTY) | dict.fromkeys(ALWAYS, object())  # which no value is


class RecordKind(enum.StrEnum):
    """The kinds of a router's files of records."""

    REQUESTS = "requests"
    FAILURES = "failures"  # those of `FAILED`
    MINUTES = "minutes"


class RecordHead(NamedTuple):
    """What a question looks at.

    Args:
        at: of its arrival, in seconds since 1970. total_s: until its end.
        asked_model: the name that it asked for; None: its model's own.
    """

    at: float
    total_s: float
    request_id: str
    client_id: str | None
    tenant: str
    model: str
    request_class: str
    outcome: str
    asked_model: str | None = None

    @property
    def ended_at(self) -> float:
        return self.at + self.total_s


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """A question. None or empty: any.

    Args:
        since, until: bounds of the arrival, with `is_failed` of the end, in seconds since 1970; `until` is excluded.
        is_failed: only what an engine or this system failed at.
        is_slow: the slowest first, instead of the newest.
        request: any id of one request.
        after: the cursor of the last page: what its last record was ordered by.
        limit: so many at most.
        asked_model: the name that was asked for, of `routes` or of a model.
    """

    tenant: str | None = None
    model: str = ""
    request_class: str = ""
    outcome: str = ""
    is_failed: bool = False
    is_slow: bool = False
    since: float = 0.0
    until: float | None = None
    request: str = ""
    after: tuple[float, str] | None = None
    limit: int = 100
    asked_model: str = ""

    def has(self, head: RecordHead) -> bool:
        """Whether a record is wanted."""
        moment = head.ended_at if self.is_failed else head.at
        return (
            moment >= self.since
            and (self.until is None or moment < self.until)
            and (self.tenant is None or head.tenant == self.tenant)
            and (not self.model or head.model == self.model)
            and (not self.asked_model or (head.asked_model or head.model) == self.asked_model)
            and (not self.request_class or head.request_class == self.request_class)
            and (not self.outcome or head.outcome == self.outcome)
            and (not self.is_failed or head.outcome in FAILED)
            and (not self.request or self._is_named(head))
            and (self.after is None or self.order(head) < self.after)
        )

    def order(self, head: RecordHead) -> tuple[float, str]:
        """The largest comes first."""
        return (head.total_s if self.is_slow else head.at), head.request_id

    def may_be_in(self, data: bytes) -> bool:
        """Whether lines may have a wanted record, by their bytes: a request is looked for in a week of them."""
        if not self.request:
            return True
        text = json.dumps(bare_id(self.request), ensure_ascii=False)[1:-1]
        return text.encode("utf-8", "surrogatepass") in data

    def _is_named(self, head: RecordHead) -> bool:
        return head.request_id in (self.request, bare_id(self.request)) or self.request == head.client_id


def head_of(record: Mapping[str, Any]) -> RecordHead:
    """The head of a whole record."""
    return RecordHead(*(record.get(name) for name in RecordHead._fields))  # type: ignore[arg-type]


def first_records(wanted: RecordFilter, records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first `limit` of some records, in order; of a request that occurs twice, one."""
    found = {record["request_id"]: record for record in records}
    return sorted(found.values(), key=lambda record: wanted.order(head_of(record)), reverse=True)[: wanted.limit]


def record_fields(receipt: Receipt, at: float, own: Mapping[str, Any]) -> dict[str, Any]:
    """A record without what is as in `EMPTY`. `at`: of its arrival, in seconds since 1970."""
    fields = receipt.json_values() | dict(own)
    return {"at": round(at, DIGITS)} | {
        name: round(value, DIGITS) if type(value) is float else value
        for name, value in fields.items()
        if value is not (left_out := _LEFT_OUT[name]) and value != left_out
    }


def full_record(kept: Mapping[str, Any]) -> dict[str, Any]:
    """A record with all its fields; `waited_for` has what `waits` has, the seconds of its waits by their reason."""
    record = dict(EMPTY) | dict(kept)
    record["waited_for"] = record["waits"]
    return record
