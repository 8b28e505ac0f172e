"""Statements for rows of batches, in a transaction of the caller.

Invariant: rows are locked in the order of batch and number, so that no two transactions wait for each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, bindparam, select, update

from serve_app.store.tables import BATCH_ROWS

ROWS = BATCH_ROWS.c
FREE = 0.0  # `leased_until` of a row that nobody has
NOBODYS: Mapping[str, Any] = {"worker": None, "claim": None, "leased_until": FREE}
WRITE_RESULT = (
    update(BATCH_ROWS)
    .where(ROWS.batch_id == bindparam("new_batch_id"), ROWS.number == bindparam("new_number"))
    .values({**NOBODYS, "is_failed": bindparam("new_is_failed"), "line": bindparam("new_line")})
)
CLAIMED = ROWS.prefix, ROWS.number  # the order in which rows are claimed

RowKey = tuple[str, int]  # a row's batch and number


def claimable() -> Select[Any]:
    """The columns of a `ClaimedRow`."""
    return select(
        ROWS.batch_id, ROWS.number, ROWS.row_offset, ROWS.row_length, ROWS.custom_id, ROWS.model, ROWS.attempts
    )


def by_batch(keys: Iterable[RowKey]) -> dict[str, list[int]]:
    """Numbers by batch, both in order: transactions that lock rows crosswise would end one of them."""
    found: dict[str, list[int]] = defaultdict(list)
    for batch_id, number in sorted(keys):
        found[batch_id].append(number)
    return found


def lock_rows(
    connection: Connection, batch_id: str, numbers: Sequence[int], condition: ColumnElement[bool]
) -> list[int]:
    """Which of these rows meet the condition, locked in their order."""
    chosen = select(ROWS.number).where(ROWS.batch_id == batch_id, ROWS.number.in_(numbers), condition)
    return list(connection.execute(chosen.order_by(ROWS.number).with_for_update()).scalars())


def change_rows(connection: Connection, batch_id: str, numbers: Sequence[int], values: Mapping[str, Any]) -> None:
    """Change rows that this transaction has locked."""
    if numbers:
        chosen = ROWS.batch_id == batch_id, ROWS.number.in_(numbers)
        connection.execute(update(BATCH_ROWS).where(*chosen).values(dict(values)))


def counts_by_model(rows: Iterable[Any]) -> dict[str, Counter[str]]:
    """Rows of batch, model and a count, as the counts of models by batch."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for batch_id, model, count in rows:
        found[batch_id][model] = count
    return found
