"""The keys of the issuer that a router knows, and how it follows the issuer.

Rules
- The JWKS is read again every `REFRESH_S`; after a failure every `RETRY_S`.
- A token with a key id that is not known starts a reading at once, unless one began for that reason within `UNKNOWN_S`.
- Its request waits `WAIT_S` at most, and with it `MAX_WAITING` requests at most.

Invariant: a request whose key id is known never waits, whatever the issuer does. A router that knows keys goes on
knowing them while the issuer is away, and a JWKS without a usable key counts as that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from serve_app.errors import AuthFailure, IssuerAway
from serve_app.http.tokens.claims import refused
from serve_app.http.tokens.jwks_source import ReadJwks, read_jwks
from serve_app.http.tokens.key_set import IssuerKey, JwksError, KeySet, parse_key_set
from serve_app.settings import JwtSettings
from serve_app.system import EventKind, event

logger = logging.getLogger("ray.serve")

REFRESH_S = 300.0  # a key that the issuer has withdrawn is accepted for so long
RETRY_S = 10.0
UNKNOWN_S = 30.0  # a flood of unknown key ids costs the issuer two requests a minute
WAIT_S = 2.0  # of a request, for a reading that takes milliseconds
MAX_WAITING = 256  # requests that wait for a reading; each holds a connection


class JwksFollower:
    """Keeps the keys of one issuer as it publishes them.

    Args:
        read: gets the text of the JWKS.
        now: seconds of a clock that only grows.
    """

    def __init__(self, read: ReadJwks = read_jwks, now: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._now = now
        self._settings: JwtSettings | None = None
        self._configured = asyncio.Event()
        self._waiting = 0
        self._forget()

    def _forget(self) -> None:
        """Know nothing of the issuer: neither its keys nor when they were asked for."""
        self._known: KeySet | None = None
        self._read_at: float | None = None  # when the keys that are known were read
        self._asked_at: float | None = None  # when an unknown key id has started a reading
        self._failed_at: float | None = None  # when the last reading has failed; None: it has not
        self._reading: asyncio.Task[None] | None = None

    def configure(self, settings: JwtSettings | None) -> None:
        """Follow this issuer from now on; None: none. Keys that came from another place are forgotten at once."""
        if settings == self._settings:
            return
        is_same = _source(settings) == _source(self._settings)
        self._settings = settings
        if not is_same:
            if self._reading is not None:
                self._reading.cancel()
            self._forget()
        self._configured.set()

    @property
    def age_s(self) -> float | None:
        """Seconds since the known keys were read; None: there are none."""
        return None if self._read_at is None else self._now() - self._read_at

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            self._configured.clear()
            if self._settings is None:
                await self._configured.wait()
                continue
            await asyncio.wait({self._begin_reading()})
            try:
                async with asyncio.timeout(REFRESH_S if self._failed_at is None else RETRY_S):
                    await self._configured.wait()
            except TimeoutError:
                continue

    def find(self, key_id: str) -> IssuerKey:
        """The key with this id.

        Raises:
            Unauthorized: the issuer has no such key. IssuerAway: that is not known, or not yet (`is_pending`).
        """
        key = None if self._known is None else self._known.keys.get(key_id)
        if key is not None:
            return key
        if self._reading is not None or self._may_ask():
            raise IssuerAway("the keys of the identity provider are being read", is_pending=True, retry_after_s=WAIT_S)
        if self._known is None or self._failed_at is not None:
            raise IssuerAway("the keys of the identity provider cannot be read at present", retry_after_s=RETRY_S)
        raise refused(AuthFailure.UNKNOWN_KEY_ID, "names a key (`kid`) that its issuer does not have")

    async def wait(self) -> None:
        """Until the keys were read again, `WAIT_S` at most; starts the reading where none runs and one may."""
        if self._reading is None:
            if not self._may_ask():
                return
            self._asked_at = self._now()
        reading = self._begin_reading()
        if self._waiting >= MAX_WAITING:
            return
        self._waiting += 1
        try:
            await asyncio.wait({reading}, timeout=WAIT_S)
        finally:
            self._waiting -= 1

    def _may_ask(self) -> bool:
        return self._settings is not None and (self._asked_at is None or self._now() - self._asked_at >= UNKNOWN_S)

    def _begin_reading(self) -> asyncio.Task[None]:
        """The reading that runs, or a new one."""
        if self._reading is None:
            self._reading = task = asyncio.create_task(self._follow(), name="JWKS")
            task.add_done_callback(self._end_reading)
        return self._reading

    def _end_reading(self, task: asyncio.Task[None]) -> None:
        if self._reading is task:
            self._reading = None

    async def _follow(self) -> None:
        """Read the keys once; what fails is logged, and the known keys stay."""
        settings = self._settings
        if settings is None:
            return
        try:
            text = await self._read(settings)
            # parsed in a thread: 64 keys hold a router for milliseconds
            found = await asyncio.to_thread(parse_key_set, text, settings.algorithms)
        except JwksError as error:
            self._fail(settings, str(error))
        except Exception as error:
            logger.exception("JWKS of %s could not be read. Report this traceback", settings.issuer)
            self._fail(settings, type(error).__name__)
        else:
            self._learn(settings, found)

    def _learn(self, settings: JwtSettings, found: KeySet) -> None:
        before: Mapping[str, IssuerKey] = {} if self._known is None else self._known.keys
        if self._failed_at is not None or before.keys() != found.keys.keys():
            again = event(EventKind.HEALTH, "jwks", away=False)
            logger.info("JWKS of %s was read: %d keys can be used", settings.issuer, len(found.keys), extra=again)
            for reason in found.left_out:
                logger.warning("JWKS of %s has a key that is not used: %s", settings.issuer, reason)
        self._known = found
        self._read_at = self._now()
        self._failed_at = None

    def _fail(self, settings: JwtSettings, reason: str) -> None:
        if self._failed_at is None:
            logger.warning(
                "JWKS of %s could not be read; known keys stay valid, and tokens of other keys get 503: %s",
                settings.issuer,
                reason,
                extra=event(EventKind.HEALTH, "jwks", away=True),
            )
        self._failed_at = self._now()


def _source(settings: JwtSettings | None) -> tuple[object, ...] | None:
    """What the keys that are known depend on."""
    if settings is None:
        return None
    return settings.issuer, settings.jwks_url, settings.jwks_file, settings.algorithms
