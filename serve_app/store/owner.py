"""The process that owns SQLite files: one named actor on the head node, through which every other process goes.

Invariant: a call that was answered is on the disk; a call repeated after the actor's death changes nothing twice, as
`SqlStore` has it.
"""

from __future__ import annotations

import operator
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.names import STORE_FILE
from serve_app.ray_adapter import restart_as
from serve_app.system import set_up_log

if TYPE_CHECKING:
    from serve_app.store.sql import SqlStore

CALLS = 8  # at once; a long sum of use holds no other call up
DEFAULT_FILE = "~/.local/state/serve-app/store.sqlite"  # of the user that runs Ray on the head node


class StoreOwner:
    """The actor's class. It owns every SQLite file that it is asked for."""

    def __init__(self) -> None:
        set_up_log("store")
        self._stores: dict[str, SqlStore] = {}
        self._opening = threading.Lock()

    def upgrade(self, release: str) -> None:
        """See `HeadActor`."""
        restart_as(release)

    def run(self, url: str | None, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A method of the `SqlStore` of `url` or of its parts; None: of the file that the environment names."""
        from serve_app.store.sql import SqlStore  # here: SQLAlchemy's 30 MB are for the owner alone

        with self._opening:
            url = url or default_url()
            if url not in self._stores:
                self._stores[url] = SqlStore(url)
        return operator.attrgetter(method)(self._stores[url])(*arguments, **named)


def default_file() -> Path:
    """The SQLite file of an instance or a head node."""
    return Path(os.environ.get(STORE_FILE) or DEFAULT_FILE).expanduser().absolute()


def default_url() -> str:
    return f"sqlite:///{default_file()}"
