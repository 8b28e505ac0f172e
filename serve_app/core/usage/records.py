"""Use as values: of one request, the sums of a day, and what a router reports. They cross process boundaries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from serve_app.core.messages import message

BATCH_SUFFIX = " (batch)"  # of a model's name, for the use of rows of batches: reports and limits have them apart


class UsageKey(NamedTuple):
    """By what use is summed.

    Args:
        day: of UTC, as 2026-11-25.
        model: that ran.
        asked_model: the name that was asked for, if it is no model's own (`core.names`); empty: it is the model's.
    """

    day: str
    key_id: str
    tenant: str
    model: str
    asked_model: str = ""

    @property
    def of_model(self) -> tuple[str, str, str, str]:
        """The fields of `MODEL_KEY`."""
        return self.day, self.key_id, self.tenant, self.model


class UsedModel(NamedTuple):
    """The names of one request in reports of use: as in `UsageKey`."""

    model: str
    asked_model: str = ""


class RequestUse(NamedTuple):
    """What one request used.

    Args:
        prompt_tokens: with the cached ones.
        kv_token_ms: tokens in the KV cache times milliseconds.
        wait_ms: from its arrival until it was handed to an engine.
        is_settled: whether its tokens are known; if not, it counts as unsettled.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    kv_token_ms: int = 0
    wait_ms: int = 0
    is_settled: bool = True


@message
@dataclass(frozen=True, slots=True)
class UsageRow:
    """Use of one day, key, tenant, model and name; in an answer empty where it is not grouped by it.

    Args:
        day: of UTC, as 2026-11-25: the one on which an engine began the requests.
        prompt_tokens, kv_token_ms, wait_ms: as in `RequestUse`.
        cost_micro: in millionths of the prices' currency, by the prices of the time.
        unsettled: requests whose tokens are not known, not in `requests`: their router died first, or their client
            left an answer that is not streamed before its end.
        asked_model: as in `UsageKey`; in an answer the model's own name instead of nothing.
    """

    day: str = ""
    key_id: str = ""
    tenant: str = ""
    model: str = ""
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    kv_token_ms: int = 0
    wait_ms: int = 0
    cost_micro: int = 0
    unsettled: int = 0
    asked_model: str = ""

    @classmethod
    def of(cls, key: UsageKey, counts: Iterable[int]) -> UsageRow:
        """`counts`: in the order of `USAGE_COUNTS`; those left out are zero."""
        found: dict[str, Any] = dict(zip(USAGE_COUNTS, counts, strict=False))
        return cls(*key.of_model, asked_model=key.asked_model, **found)


MODEL_KEY = UsageKey._fields[:-1]  # without the name that was asked for
USAGE_KEY = UsageKey._fields
USAGE_COUNTS = tuple(field.name for field in fields(UsageRow) if field.name not in USAGE_KEY)


@message
@dataclass(frozen=True, slots=True)
class InFlightUse:
    """Requests to one model that a source has begun and not settled, whatever name they asked for."""

    day: str
    key_id: str
    tenant: str
    model: str
    count: int


@message
@dataclass(frozen=True, slots=True)
class UsageBatch:
    """What a source (a router replica) adds: the use since its last batch, and what is in flight after it.

    Args:
        seq: from 1 upwards; a batch sent twice counts once.
        rows: at most one for each `UsageKey`.
    """

    source: str
    seq: int
    rows: tuple[UsageRow, ...]
    in_flight: tuple[InFlightUse, ...] = ()
