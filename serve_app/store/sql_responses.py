"""Responses and their items over SQLAlchemy: each method is one transaction, durable when it returns. Calls block.

Invariant: what a tenant has is found by that tenant alone, and not after its time. A record comes and goes with all its
items. Records of a chain live as long as the newest that was added to it. A tenant has at most the bytes that were
allowed with its newest record: its records whose time ends first go first. A record whose time is over gives its id
free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, and_, delete, func, literal, select, tuple_, update

from serve_app.core.responses import ITEM_ID, Chain, StoredItem, StoredResponse, evicted
from serve_app.store.database import Database
from serve_app.store.tables import RESPONSE_EVENTS, RESPONSE_ITEMS, RESPONSES

R = RESPONSES.c
ITEMS = RESPONSE_ITEMS.c
NO_JOB: Mapping[str, Any] = {}
MAX_IDS = 10_000  # in one statement, of two parameters at most: SQLite takes 32,766
MAX_TURNS = 10_000  # of a conversation: each has some 20 JSON values, so as many as a body may have by default
EVICTED_AT_ONCE = 256  # records that are read to make room: most times one is enough

_T = TypeVar("_T")


class SqlResponses:
    """Threads may share it. Every method raises StoreAway if the database cannot be used; the next call tries again."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def chain(self, tenant: str, previous_id: str | None, item_ids: Sequence[str], max_bytes: int) -> Chain:
        """The turns up to `previous_id`, and stored items by their ids, those that there are; of an id that several
        have, the newest. Without items, if they have more than `max_bytes`; an item counts as often as its id comes."""
        with self._database.reading() as connection:
            size, references = self._items_of(connection, tenant, item_ids, max_bytes)
            if references is None or previous_id is None:
                return Chain(references=references or {}, size=size, is_too_large=references is None)
            turns = self._turns(connection, tenant, previous_id)
            ids = tuple(row.response_id for row in reversed(turns))
            if turns and turns[0].runs:
                return Chain(ids, is_running=True)
            if len(turns) > MAX_TURNS:
                return Chain(ids, is_too_large=True)
            missing = previous_id if not turns else turns[-1].previous_id
            if missing is not None:
                return Chain(ids, missing=missing)
            items = list[str]()
            for name in ids:
                chosen = select(ITEMS.body).where(ITEMS.response_id == name).order_by(ITEMS.number)
                for text in connection.execute(chosen).scalars():
                    size += len(text.encode())
                    if size > max_bytes:
                        return Chain(ids, size=size, is_too_large=True)
                    items.append(text)
            return Chain(ids, tuple(items), references, size)

    def add(self, record: StoredResponse, max_tenant_bytes: int) -> int:
        """Add a record; one of this id stays as it is. What it continues lives as long. Returns how many records of the
        tenant were removed for it; it is itself one of them if it alone has more bytes."""
        with self._database.writing() as connection:
            return self.add_in(connection, record, max_tenant_bytes)

    def add_in(
        self, connection: Connection, record: StoredResponse, max_tenant_bytes: int, columns: Mapping[str, Any] = NO_JOB
    ) -> int:
        """As `add`, in a transaction of the caller. `columns`: of its job."""
        over = R.response_id == record.response_id, R.expires_at <= self._database.now()
        _remove(connection, connection.execute(select(R.response_id).where(*over)).scalars().all())
        values = {
            "response_id": record.response_id,
            "tenant": record.tenant,
            "previous_id": record.previous_id,
            "created_at": record.created_at,
            "used_at": record.created_at,
            "expires_at": record.expires_at,
            "size": record.size,
            "body": record.text,
            **columns,
        }
        items = [
            {
                "response_id": record.response_id,
                "number": number,
                "tenant": record.tenant,
                "item_id": item.item_id,
                "is_output": item.is_output,
                "body": item.text,
            }
            for number, item in enumerate(record.items)
        ]
        adding = self._database.insert(RESPONSES).values(values).on_conflict_do_nothing()
        if connection.execute(adding.returning(R.response_id)).scalar() is None:
            return 0
        if items:
            connection.execute(self._database.insert(RESPONSE_ITEMS), items)
        if record.previous_id is not None:
            before = [row.response_id for row in self._turns(connection, record.tenant, record.previous_id)]
            newest = {R.used_at: record.created_at, R.expires_at: record.expires_at}
            for some in _pieces(before):
                for column, at in newest.items():
                    later = update(RESPONSES).where(R.response_id.in_(some), column < at)
                    connection.execute(later.values({column: at}))
        return self.make_room(connection, record.tenant, max_tenant_bytes)

    def response(self, response_id: str, tenant: str) -> StoredResponse:
        """Raises KeyError: none, another tenant's, or its time is over."""
        with self._database.reading() as connection:
            found = response_in(connection, *self._alive(response_id, tenant))
            if found is None:
                raise KeyError(response_id)
            return found

    def delete(self, response_id: str, tenant: str) -> bool:
        """Whether there was one."""
        with self._database.writing() as connection:
            found = connection.execute(select(R.response_id).where(*self._alive(response_id, tenant))).scalar()
            _remove(connection, [] if found is None else [found])
            return found is not None

    def forget(self, limit: int, keep_s: float) -> int:
        """Remove records whose time is over, and those that nothing has continued for `keep_s`, at most `limit`.
        Returns how many."""
        now = self._database.now()
        count = 0
        with self._database.writing() as connection:
            # a background response that has not ended is no use's end: it stays until it expires
            unused = and_(R.used_at <= now - keep_s, R.job.is_(None))
            for column, is_over in ((R.expires_at, R.expires_at <= now), (R.used_at, unused)):
                over = select(R.response_id).where(is_over).order_by(column).limit(limit - count)
                # another router removes those that it has locked
                found = connection.execute(over.with_for_update(skip_locked=True)).scalars().all()
                _remove(connection, found)
                count += len(found)
        return count

    def _alive(self, response_id: str, tenant: str) -> tuple[Any, ...]:
        return R.response_id == response_id, R.tenant == tenant, R.expires_at > self._database.now()

    def _turns(self, connection: Connection, tenant: str, last: str) -> list[Any]:
        """Id, the id before it, and whether it runs, of the responses of a chain, the newest first, up to one that
        comes again; more than `MAX_TURNS`: there are too many."""
        columns = R.response_id, R.previous_id, R.job.is_not(None).label("runs")
        chain = (
            select(*columns, literal(0).label("place")).where(*self._alive(last, tenant)).cte("chain", recursive=True)
        )
        before = select(*columns, chain.c.place + 1).where(
            R.response_id == chain.c.previous_id,
            R.tenant == tenant,
            R.expires_at > self._database.now(),
            chain.c.place < MAX_TURNS,
        )
        chain = chain.union_all(before)
        turns: dict[str, Any] = {}
        for row in connection.execute(select(chain).order_by(chain.c.place)):
            if row.response_id in turns:
                break
            turns[row.response_id] = row
        return list(turns.values())

    def _items_of(
        self, connection: Connection, tenant: str, item_ids: Sequence[str], max_bytes: int
    ) -> tuple[int, dict[str, str] | None]:
        """The bytes of these items, each as often as its id comes, and the items by id; None: they have more than
        `max_bytes`, and are not read then."""
        counts = Counter(one for one in item_ids if ITEM_ID.fullmatch(one) is not None)  # others are nobody's
        newest: dict[str, Any] = {}
        for some in _pieces(sorted(counts)):
            chosen = (
                select(ITEMS.item_id, ITEMS.response_id, ITEMS.number, func.length(ITEMS.body).label("characters"))
                .join(RESPONSES, R.response_id == ITEMS.response_id)
                .where(ITEMS.tenant == tenant, ITEMS.item_id.in_(some), R.expires_at > self._database.now())
                .order_by(R.created_at, ITEMS.number)
            )
            newest |= {row.item_id: row for row in connection.execute(chosen)}
        size = sum(counts[row.item_id] * row.characters for row in newest.values())
        if size > max_bytes:  # a character has a byte at least
            return size, None
        found: dict[str, str] = {}
        for keys in _pieces([(row.response_id, row.number) for row in newest.values()]):
            chosen = select(ITEMS.item_id, ITEMS.body).where(tuple_(ITEMS.response_id, ITEMS.number).in_(keys))
            found |= {row.item_id: row.body for row in connection.execute(chosen)}
        size = sum(counts[name] * len(text.encode()) for name, text in found.items())
        return size, found if size <= max_bytes else None

    def make_room(self, connection: Connection, tenant: str, max_bytes: int) -> int:
        """Remove the tenant's records whose time ends first, of a chain the oldest first, until the others fit."""
        total = select(func.coalesce(func.sum(R.size), 0)).where(R.tenant == tenant)
        first = select(R.response_id, R.size).where(R.tenant == tenant)
        first = first.order_by(R.expires_at, R.created_at, R.response_id).limit(EVICTED_AT_ONCE).with_for_update()
        count = 0
        while connection.execute(total).scalar_one() > max_bytes:
            sizes = [(*row,) for row in connection.execute(first)]
            excess = connection.execute(total).scalar_one() - max_bytes  # another router may have made room meanwhile
            gone = evicted(sizes, excess)
            _remove(connection, gone)
            count += len(gone)
        return count


def response_in(connection: Connection, *chosen: Any) -> StoredResponse | None:
    """The response that is chosen by these conditions, with its items; None: there is none."""
    row = connection.execute(select(RESPONSES).where(*chosen)).one_or_none()
    if row is None:
        return None
    items = select(ITEMS.item_id, ITEMS.is_output, ITEMS.body).where(ITEMS.response_id == row.response_id)
    return StoredResponse(
        response_id=row.response_id,
        tenant=row.tenant,
        previous_id=row.previous_id,
        created_at=row.created_at,
        expires_at=row.expires_at,
        text=row.body,
        items=tuple(StoredItem(*one) for one in connection.execute(items.order_by(ITEMS.number))),
    )


def _remove(connection: Connection, ids: Sequence[str]) -> None:
    """Remove records with their items."""
    for some in _pieces(ids):
        connection.execute(delete(RESPONSE_ITEMS).where(ITEMS.response_id.in_(some)))
        connection.execute(delete(RESPONSE_EVENTS).where(RESPONSE_EVENTS.c.response_id.in_(some)))
        connection.execute(delete(RESPONSES).where(R.response_id.in_(some)))


def _pieces(ids: Sequence[_T]) -> list[Sequence[_T]]:
    return [ids[start : start + MAX_IDS] for start in range(0, len(ids), MAX_IDS)]
