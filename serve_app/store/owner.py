"""The process that owns SQLite files: one named actor on the head node, through which every other process goes.

Invariant: a call that was answered is on the disk; a call repeated after the actor's death changes nothing twice, as
`SqlStore` has it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import operator
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from serve_app.errors import StoreAway, Unavailable
from serve_app.names import DISTRIBUTION, RELEASE, STORE_ACTOR, STORE_FILE
from serve_app.ray_adapter import HEAD_ACTOR

if TYPE_CHECKING:
    from serve_app.store.sql import SqlStore

logger = logging.getLogger("ray.serve")

THREADS = 8  # calls at once; a long sum of use holds no other call up
DEFAULT_FILE = "~/.local/state/serve-app/store.sqlite"  # of the user that runs Ray on the head node
CALL_S = 10.0  # an answer takes milliseconds, the actor's restart a few seconds
RETRY_S = 0.25  # between calls while the actor restarts


class StoreOwner:
    """The actor's class. It owns every SQLite file that it is asked for."""

    def __init__(self) -> None:
        self._stores: dict[str, SqlStore] = {}
        self._opening = threading.Lock()

    def upgrade(self, release: str) -> None:
        """Run the release of a router that starts, if it is what is installed here: this process ends, and Ray starts
        it again with the code on the disk."""
        restart_as(release)

    def pid(self) -> int:
        return os.getpid()

    def run(self, url: str | None, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A method of the `SqlStore` of `url` or of its `batches`; None: of the file that the environment names."""
        from serve_app.store.sql import SqlStore  # here: SQLAlchemy's 30 MB are for the owner alone

        with self._opening:
            url = url or default_url()
            if url not in self._stores:
                self._stores[url] = SqlStore(url)
        return operator.attrgetter(method)(self._stores[url])(*arguments, **named)


def restart_as(release: str) -> None:
    """End this actor's process if another release than its own is installed and is the one asked for."""
    if RELEASE != release == importlib.metadata.version(DISTRIBUTION):
        logger.warning("an actor of release %s restarts as %s", RELEASE, release)
        os.kill(os.getpid(), signal.SIGKILL)  # Ray restarts no actor that exits by itself


def default_file() -> Path:
    """The SQLite file of an instance or a head node."""
    return Path(os.environ.get(STORE_FILE) or DEFAULT_FILE).expanduser().absolute()


def default_url() -> str:
    return f"sqlite:///{default_file()}"


class OwnerCalls:
    """Calls of an actor of the head node; starts it if it does not exist, and finds it again after its end. Ray must be
    initialised.

    Args:
        target: what the actor's `run` is called for: the URL of a database, a folder.
        start: finds or starts the actor; by default the store's.
        name: of the actor in errors.
        bound_s: for an answer; by default `CALL_S`.
        away: raised without an answer.
    """

    def __init__(
        self,
        target: str | None,
        start: Callable[[], ActorHandle[Any]] | None = None,
        name: str = "the store's actor",
        bound_s: float | None = None,
        away: type[Unavailable] = StoreAway,
    ) -> None:
        self._target = target
        self._start = start
        self._name = name
        self._bound_s = bound_s
        self._away = away
        self._actor: ActorHandle[Any] | None = None

    async def __call__(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Raises `away`: no answer in time; what the method raises otherwise."""
        bound_s = CALL_S if self._bound_s is None else self._bound_s
        try:
            async with asyncio.timeout(bound_s):
                while True:
                    try:
                        actor = await self._find()
                        return await actor.run.remote(self._target, method, arguments, named)
                    except RayTaskError:
                        raise
                    except ActorDiedError:
                        self._actor = None
                    except RayError as error:
                        logger.info("%s does not answer (%s); trying again", self._name, type(error).__name__)
                    await asyncio.sleep(RETRY_S)
        except RayTaskError as error:
            raise error.cause from None
        except TimeoutError:
            raise self._away(f"{self._name} has not answered within {bound_s:g} s", retry_after_s=1.0) from None

    async def _find(self) -> ActorHandle[Any]:
        if self._actor is None:
            self._actor = await asyncio.to_thread(self._start or store_actor)
            self._actor.upgrade.remote(RELEASE)  # not waited for: an actor that restarts is found again
        return self._actor


def store_actor() -> ActorHandle[Any]:
    """The cluster's actor; the first caller starts it."""
    made: Any = ray.remote(StoreOwner).options(name=STORE_ACTOR, max_concurrency=THREADS, **HEAD_ACTOR)
    started: ActorHandle[Any] = made.remote()
    return started
