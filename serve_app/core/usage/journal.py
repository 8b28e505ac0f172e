"""The use of a router that was killed, from what it had written down.

A journal is JSON, a list a line: a meter's state as of its last batch, then each beginning and end since. Whoever finds
one has that meter again, and with it the batches that its router would have sent: the last one under its own number, so
that it counts once whether or not the store had it.

The release before finds no names that were asked for, so a line has one only where a request had one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from serve_app.core.limits import TokenPrices
from serve_app.core.usage.meter import UsageMeter
from serve_app.core.usage.records import InFlightUse, RequestUse, UsageBatch, UsageKey, UsageRow

_STATE = "state"
_BEGIN = "begin"
_END = "end"


def state_line(meter: UsageMeter) -> bytes:
    """The first line of a journal, of a meter without sums: it is new, or has just made a batch."""
    batch = meter.sent
    requests = [_begun(request_id, *begun) for request_id, begun in meter.in_flight.items()]
    return _line(_STATE, meter.source, None if batch is None else _plain(batch), requests)


def begin_line(request_id: str, key: UsageKey, prices: TokenPrices | None) -> bytes:
    """`UsageMeter.begin`."""
    return _line(_BEGIN, *_begun(request_id, key, prices))


def end_line(request_id: str, use: RequestUse | None) -> bytes:
    """`UsageMeter.end`."""
    return _line(_END, request_id, use)


def meter_of(journal: bytes) -> UsageMeter:
    """The meter whose journal this is, with what was in flight ended as unsettled. A last line without its end, of a
    writer killed inside it, does not count. Raises ValueError: it is no journal."""
    try:
        (word, source, batch, requests), *events = [json.loads(line) for line in journal.split(b"\n")[:-1]]
        if word != _STATE:
            raise ValueError(f"it begins with {word!r}")
        meter = UsageMeter(source, None if batch is None else _batch(batch))
        for begun in requests:
            meter.begin(*_of_begun(*begun))
        for word, *arguments in events:
            if word == _BEGIN:
                meter.begin(*_of_begun(*arguments))
            else:
                request_id, use = arguments
                meter.end(request_id, None if use is None else RequestUse(*use))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no journal of use: {error}") from None
    for request_id in list(meter.in_flight):
        meter.end(request_id, RequestUse(is_settled=False))
    return meter


def _line(*values: Any) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def _begun(request_id: str, key: UsageKey, prices: TokenPrices | None) -> list[Any]:
    return [request_id, *key.of_model, prices, *([key.asked_model] if key.asked_model else [])]


def _of_begun(
    request_id: str, day: str, key_id: str, tenant: str, model: str, prices: list[Any] | None, asked_model: str = ""
) -> tuple[str, UsageKey, TokenPrices | None]:
    key = UsageKey(day, key_id, tenant, model, asked_model)
    return request_id, key, None if prices is None else TokenPrices(*prices)


def _plain(batch: UsageBatch) -> dict[str, Any]:
    plain = asdict(batch)
    for row in plain["rows"]:
        if not row["asked_model"]:
            del row["asked_model"]
    return plain


def _batch(batch: dict[str, Any]) -> UsageBatch:
    rows = tuple(UsageRow(**row) for row in batch["rows"])
    in_flight = tuple(InFlightUse(**entry) for entry in batch["in_flight"])
    return UsageBatch(batch["source"], batch["seq"], rows, in_flight)
