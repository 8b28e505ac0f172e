"""The entries of the audit record for deployments, and for what else a driver does: a drain, a defragmentation.

The author is a key, or the machine: commands there need no key, but a shell. Then an entry names the user and the host.

Invariant: nothing waits for the store, and nothing fails because it is away: what was to be done is done, and the
answer says that the record lacks it.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from serve_app.names import APPLICATION
from serve_app.settings import configuration_digest, resolve, split_arguments
from serve_app.store import MACHINE, AuditAction, AuditEntry, Author, Store, unrecorded

logger = logging.getLogger("serve_app")

Entry = Mapping[str, Any] | None  # of `applications` in Serve's configuration; None: none was declared


class AuditWriter:
    """Adds entries, each in a thread.

    Args:
        open_store: makes the store of a URL.
        now: seconds since 1970 UTC.
        author: the key that asked; None: the machine.
    """

    def __init__(
        self, open_store: Any = Store.through_actor, now: Any = time.time, author: Author | None = None
    ) -> None:
        self._open_store = open_store
        self._now = now
        self._author = author
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="audit record")

    def deployed(self, action: AuditAction, before: Entry, after: Entry) -> Future[str]:
        """An application was declared in place of another one. As `changed`."""
        digests = [None if one is None else configuration_digest(one.get("args") or {}) for one in (before, after)]
        release = split_arguments((after or {}).get("args") or {})[0]
        return self.changed(action, APPLICATION, after, digests, release=release)

    def changed(
        self,
        action: AuditAction,
        target: str,
        application: Entry,
        digests: list[str | None] | None = None,
        **details: Any,
    ) -> Future[str]:
        """Something was done. The result: why it is not in the record; empty: it is.

        Args:
            application: names the store.
            digests: of the configuration before and after.
        """
        if self._author is None:
            details |= {"user": _user(), "host": socket.gethostname()}
        before, after = digests or (None, None)
        author = self._author or Author(MACHINE)
        entry = AuditEntry(action, target, author, self._now(), before, after, details)
        return self._threads.submit(self._add, store_url(application), entry)

    def _add(self, url: str | None, entry: AuditEntry) -> str:
        try:
            asyncio.run(self._open_store(url).add_audit(entry))
        except Exception as error:  # noqa: BLE001 - of an actor of another release, too: what was done is done
            return unrecorded(entry, error, logger)
        return ""


def store_url(application: Entry) -> str | None:
    """The URL of the store of an application's configuration, as far as it can be read."""
    _, _, configuration = split_arguments((application or {}).get("args") or {})
    store = resolve(configuration, {}).data.get("store")
    url = store.get("url") if isinstance(store, Mapping) else None
    return url if isinstance(url, str) else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # of a container without a passwd entry
        return "unknown"
