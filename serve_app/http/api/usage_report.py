"""GET /admin/usage: sums of use from the store, of a tenant's key its own tenant's.

    ?by=day,tenant      by what it is summed: any of day, tenant, key, name (that was asked for), model (that ran);
                        by default all but name
    &from=2026-11-01&to=2026-11-30      days of UTC, inclusive
    &tenant=..&key=..&name=..&model=..  only these

Invariant: a key without `auth.keys[].admin` gets no row of another tenant.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.core.usage import USAGE_COUNTS, UsageRow
from serve_app.errors import BadRequest, Forbidden, StoreAway
from serve_app.http.fields import query_pairs
from serve_app.store import UsageQuery
from serve_app.types import Identity

ANSWER_TIMEOUT_S = 10.0  # sums over some 100,000 rows of a year take a second
PARAMETERS = "by", "from", "to", "tenant", "key", "name", "model"
FIELDS = {
    "day": "day",
    "tenant": "tenant",
    "key": "key_id",
    "name": "asked_model",
    "model": "model",
}  # of a row, by their words here
BY_DEFAULT = tuple(word for word in FIELDS if word != "name")  # as before there were names: a row each

GetUsage = Callable[[UsageQuery], Awaitable[list[UsageRow]]]


async def usage_report(get_usage: GetUsage, identity: Identity, query: bytes) -> dict[str, Any]:
    """The sums that the query of the URL asks for.

    Raises:
        BadRequest: an unknown parameter, word or day. Forbidden: another tenant's. StoreAway: no answer.
    """
    asked = usage_query(identity, query)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            rows = await get_usage(asked)
    except TimeoutError as error:
        raise StoreAway(f"the store has not answered within {ANSWER_TIMEOUT_S:g} s") from error
    by = [word for word, field in FIELDS.items() if field in asked.by]
    shown = {**{word: FIELDS[word] for word in by}, **{name: name for name in USAGE_COUNTS}}
    data = [{word: getattr(row, field) for word, field in shown.items()} for row in rows]
    return {"object": "list", "by": by, "from": asked.from_day, "to": asked.to_day, "data": data}


def usage_query(identity: Identity, query: bytes) -> UsageQuery:
    """What the URL asks for, as far as the key may know it. Raises BadRequest, Forbidden."""
    given = query_pairs(query, PARAMETERS)
    words = {name: value for name, value in given if name != "by"}
    if not identity.admin and words.setdefault("tenant", identity.tenant) != identity.tenant:
        raise Forbidden("this key may read the use of its own tenant only", param="tenant", code="not_admin")
    by = [word for name, value in given if name == "by" for word in value.split(",") if word]
    for word in by:
        if word not in FIELDS:
            raise BadRequest(f"`by` has {word[:40]!r}; it can have {', '.join(FIELDS)}", param="by")
    return UsageQuery(
        by=tuple(field for word, field in FIELDS.items() if word in (by or BY_DEFAULT)),
        from_day=_day(words, "from"),
        to_day=_day(words, "to"),
        tenant=words.get("tenant"),
        key_id=words.get("key"),
        model=words.get("model"),
        asked_model=words.get("name"),
    )


def _day(words: dict[str, str], name: str) -> str | None:
    day = words.get(name)
    if day is None:
        return None
    try:
        return datetime.datetime.strptime(day, "%Y-%m-%d").date().isoformat()
    except ValueError:
        raise BadRequest(f"`{name}` must be a day, as 2026-11-25", param=name) from None
