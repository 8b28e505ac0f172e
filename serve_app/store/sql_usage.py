"""Use in the tables: what a batch adds to them, and the sums that a question asks for.

`usage` has all use by the model that ran, and `named_usage` the part of it whose requests asked for a name of `routes`.
So a request that asked for the model itself is in the first one alone, as all are that a release before has added.

Invariant: both tables are changed in one transaction, and read in one statement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, FromClause, Select, Table, func, select, union_all

from serve_app.core.usage import BATCH_SUFFIX, MODEL_KEY, USAGE_COUNTS, USAGE_KEY, UsageRow
from serve_app.store.records import UsageQuery
from serve_app.store.tables import NAMED_USAGE, USAGE

Insert = Callable[[Table], Any]  # an INSERT that can say ON CONFLICT


def add_rows(connection: Connection, insert: Insert, rows: Iterable[UsageRow]) -> None:
    """Add use to both tables."""
    found = list(rows)
    _add(connection, insert(USAGE), USAGE, MODEL_KEY, found)
    _add(connection, insert(NAMED_USAGE), NAMED_USAGE, USAGE_KEY, [row for row in found if row.asked_model])


def usage_sums(query: UsageQuery) -> Select[Any]:
    """The sums of a question, ordered by what they are grouped by. Raises ValueError: `by` has an unknown word."""
    if unknown := set(query.by) - set(USAGE_KEY):
        raise ValueError(f"usage is not kept by {sorted(unknown)[0]!r}")
    has_names = query.asked_model is not None or "asked_model" in query.by
    table: FromClause = _with_names(query) if has_names else USAGE
    groups = [table.c[name] for name in query.by]
    sums = select(*groups, *(func.sum(table.c[name]).label(name) for name in USAGE_COUNTS))
    if not has_names:
        sums = _filtered(sums, USAGE, query)
    elif query.asked_model is not None:
        sums = sums.where(table.c.asked_model.in_(_names(query.asked_model)))
    return sums.group_by(*groups).order_by(*groups)


def _add(connection: Connection, adding: Any, table: Table, key: tuple[str, ...], rows: list[UsageRow]) -> None:
    summed: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        fields = asdict(row)
        values = summed.setdefault(tuple(fields[name] for name in key), dict.fromkeys(USAGE_COUNTS, 0))
        for name in USAGE_COUNTS:
            values[name] += fields[name]
    # in the same order everywhere: two transactions of PostgreSQL that lock rows crosswise would end one of them
    ordered = [dict(zip(key, place, strict=True)) | values for place, values in sorted(summed.items())]
    if ordered:
        sums = {name: table.c[name] + adding.excluded[name] for name in USAGE_COUNTS}
        connection.execute(adding.on_conflict_do_update(index_elements=key, set_=sums), ordered)


def _with_names(query: UsageQuery) -> FromClause:
    """Rows of the question with the name that was asked for: all use by the model's own, and what of it asked for
    another one, added there and taken away from the model's."""
    own = USAGE.c.model.label("asked_model")
    lent = NAMED_USAGE.c.model.label("asked_model")
    parts = (
        (USAGE, own, [USAGE.c[name] for name in USAGE_COUNTS]),
        (NAMED_USAGE, NAMED_USAGE.c.asked_model, [NAMED_USAGE.c[name] for name in USAGE_COUNTS]),
        (NAMED_USAGE, lent, [(-NAMED_USAGE.c[name]).label(name) for name in USAGE_COUNTS]),
    )
    selects = [
        _filtered(select(*(table.c[name] for name in MODEL_KEY), asked, *counts), table, query)
        for table, asked, counts in parts
    ]
    return union_all(*selects).subquery()


def _filtered(chosen: Select[Any], table: Table, query: UsageQuery) -> Select[Any]:
    if query.model is not None:
        chosen = chosen.where(table.c.model.in_(_names(query.model)))
    for name, wanted in (("tenant", query.tenant), ("key_id", query.key_id)):
        if wanted is not None:
            chosen = chosen.where(table.c[name] == wanted)
    if query.from_day is not None:
        chosen = chosen.where(table.c.day >= query.from_day)
    return chosen if query.to_day is None else chosen.where(table.c.day <= query.to_day)


def _names(name: str) -> tuple[str, str]:
    """A name, and that of its rows of batches."""
    return name, name + BATCH_SUFFIX
