"""The keys of the store that a router knows, and how it follows the store.

Invariant: a router that knows a key goes on knowing it while the store is away, and every router knows a change within
a second while it is there. A router that starts while the store is away asks the other routers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from serve_app.errors import StoreAway
from serve_app.ray_adapter import CALL_ERRORS, NO_ANSWER
from serve_app.store import KeyRecord, Store
from serve_app.system import EventKind, event
from serve_app.types import Identity

logger = logging.getLogger("ray.serve")

POLL_S = 0.5  # a change reaches every router within a second
ROUTERS_S = 2.0  # for the other routers to answer, which takes milliseconds
FIRST_LIST_S = 15.0  # a router that starts waits so long for its first list: the store's actor may start with it

KeyList = tuple[int, list[KeyRecord]]  # the version of a list, and its keys
AskRouters = Callable[[], Awaitable[Iterable[Awaitable[KeyList | None]]]]


class KeyTable:
    """Keys of the store.

    `version`: of the store, up to which every change is known; None: there never was a list.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.by_id: dict[str, KeyRecord] = {}
        self._by_digest: dict[bytes, tuple[KeyRecord, Identity]] = {}

    def replace(self, version: int, records: Iterable[KeyRecord]) -> None:
        """Know these keys and no others."""
        self.by_id = {}
        self._by_digest = {}
        self.update(version, records)

    def update(self, version: int, records: Iterable[KeyRecord]) -> None:
        """All changes up to a version."""
        for record in records:
            self.learn(record)
        self.version = version

    def learn(self, record: KeyRecord) -> None:
        """One key as it is now, unless a newer state of it is known."""
        old = self.by_id.get(record.key_id)
        if old is not None:
            if old.version > record.version:
                return
            for digest in (old.digest, old.previous_digest):
                if digest is not None:
                    self._by_digest.pop(digest, None)
        self.by_id[record.key_id] = record
        for digest in (record.digest, record.previous_digest):
            if digest is not None:
                self._by_digest[digest] = record, identity_of(record)

    def find(self, digest: bytes) -> tuple[KeyRecord, Identity] | None:
        """The key with this digest, or that had it before its last rotation."""
        return self._by_digest.get(digest)

    def known(self) -> KeyList | None:
        """For a router that starts: all of it; None: nothing is known here."""
        return None if self.version is None else (self.version, list(self.by_id.values()))


class KeyFollower:
    """Keeps `stored` as the store has it.

    Args:
        url: of the store.
        ask_routers: asks every router for `KeyTable.known`; the call and the answers may raise CALL_ERRORS.
        open_store: makes the store of a URL.
    """

    def __init__(
        self, url: str | None, ask_routers: AskRouters, open_store: Callable[[str | None], Store] = Store.at
    ) -> None:
        self._url = url
        self._open = open_store
        self._ask_routers = ask_routers
        self.store = open_store(url)
        self.stored = KeyTable()
        self._since = 0  # the version of this store up to which its changes are known; 0: its whole list is needed
        self._away = False
        self._listed = asyncio.Event()

    def configure(self, url: str | None) -> None:
        """Follow the store of this URL from now on; until its list is here, the keys known so far stay."""
        if url != self._url:
            self.store.close()
            self.store = self._open(url)
            self._url = url
            self._since = 0

    async def run(self) -> None:
        """Follow until cancelled."""
        # at once: a store that is away is known to be so only after seconds
        asking = asyncio.create_task(self._learn_from_routers(), name="keys of other routers")
        try:
            while True:
                try:
                    await self._follow_or_ask()
                except Exception:
                    logger.exception(
                        "Store keys could not be read and are read again in %.1f s. Report this traceback", POLL_S
                    )
                await asyncio.sleep(POLL_S)
        finally:
            asking.cancel()

    async def _follow_or_ask(self) -> None:
        try:
            await self.follow()
        except StoreAway as error:
            if not self._away:
                logger.warning(
                    "Store is away; known keys stay valid, and key changes wait until it answers: %s",
                    error,
                    extra=event(EventKind.HEALTH, "store", away=True),
                )
            self._away = True
            if self.stored.version is None:
                await self._learn_from_routers()

    async def follow(self) -> None:
        """Take over what has changed since the last time. Raises StoreAway."""
        store = self.store
        since = self._since
        version, records = await store.keys_since(since)
        if store is not self.store:
            return  # configured anew meanwhile
        if since == 0 or version < since:  # an older version than was seen: the store was restored from a backup
            self.stored.replace(version, records)
        else:
            self.stored.update(version, records)
        self._since = version
        self._listed.set()
        if self._away:
            again = event(EventKind.HEALTH, "store", away=False)
            logger.info("Store answers again; key changes apply from now on", extra=again)
        self._away = False

    async def wait_for_list(self, timeout_s: float) -> None:
        """Until there is a list, `timeout_s` at most."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._listed.wait()
        except TimeoutError:
            logger.warning(
                "Store listed no keys within %.0f s; keys outside the configuration get 503 until it does", timeout_s
            )

    async def _learn_from_routers(self) -> None:
        """Take the newest list that another router knows, unless one came from the store meanwhile."""
        lists: list[KeyList] = []
        try:
            async with asyncio.timeout(ROUTERS_S):
                for answer in asyncio.as_completed([_or_none(one) for one in await self._ask_routers()]):
                    if (found := await answer) is not None:
                        lists.append(found)
        except NO_ANSWER as error:
            logger.info("Routers did not all send their keys within %.0f s: %s", ROUTERS_S, type(error).__name__)
        if lists and self.stored.version is None:
            version, records = max(lists, key=lambda listed: listed[0])
            self.stored.replace(version, records)
            self._since = version
            self._listed.set()


def identity_of(record: KeyRecord) -> Identity:
    return Identity(
        tenant=record.tenant,
        max_class=record.max_class,
        default_class=record.default_class,
        admin=record.admin,
        metrics=record.metrics,
        deploy=record.deploy,
        key_id=record.key_id,
        models=None if record.usable_models is None else frozenset(record.usable_models),
    )


async def _or_none(answer: Awaitable[KeyList | None]) -> KeyList | None:
    try:
        return await answer
    except CALL_ERRORS:
        return None
