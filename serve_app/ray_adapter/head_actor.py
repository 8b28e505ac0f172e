"""Actors that the whole cluster has one of, on its head node: started if they do not exist, found again after their
end, restarted as the release of the process that finds them.

Invariant: a call goes to the one actor of this name; where it fails because the actor is gone for good, the next call
starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorAlreadyExistsError, ActorDiedError, RayError, RayTaskError

from serve_app.core.times import ACTOR_RETRY_S
from serve_app.errors import Unavailable
from serve_app.names import DEPLOYMENT_ACTOR, DISTRIBUTION, HEAD_ACTORS, NAMESPACE, RELEASE

logger = logging.getLogger("ray.serve")

# On the head node (by Ray's own resource), not in the placement group of the replica that happens to start it, and
# restarted whenever it dies.
_PLACE: dict[str, Any] = {
    "resources": {"node:__internal_head__": 0.001},
    "scheduling_strategy": "DEFAULT",
    "num_cpus": 0,
}
_LIFE: dict[str, Any] = {"namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1}


@dataclass(slots=True, eq=False)
class HeadActor:
    """Calls of one of these actors. Ray must be initialised.

    Args:
        name: in Ray.
        actor_class: has a method `upgrade` that calls `restart_as`.
        max_concurrency: calls at once.
        arguments: of its constructor; the first caller in the cluster starts it, with its own.
    """

    name: str
    actor_class: type[Any]
    max_concurrency: int
    arguments: tuple[Any, ...] = ()
    _handle: ActorHandle[Any] | None = field(default=None, init=False)

    def find(self) -> ActorHandle[Any]:
        """The actor. May wait for Ray."""
        if self._handle is None:
            options = {"name": self.name, "max_concurrency": self.max_concurrency, **_PLACE, **_LIFE}
            made: Any = ray.remote(self.actor_class).options(**options)
            self._handle = made.remote(*self.arguments)
            self._handle.upgrade.remote(RELEASE)  # not waited for: an actor that restarts is found again
        return self._handle

    async def call(self, method: str, *arguments: Any) -> Any:
        """One call. Raises Ray's errors; those of the method are the causes of a RayTaskError."""
        handle = self._handle or await asyncio.to_thread(self.find)
        try:
            return await getattr(handle, method).remote(*arguments)
        except ActorDiedError:
            self._handle = None
            raise

    def call_and_wait(self, method: str, timeout_s: float, *arguments: Any) -> Any:
        """As `call`, from a thread. Raises GetTimeoutError, too."""
        try:
            return ray.get(getattr(self.find(), method).remote(*arguments), timeout=timeout_s)
        except ActorDiedError:
            self._handle = None
            raise

    def calls_of(
        self, target: str | None, subject: str, bound_s: float, away: type[Unavailable]
    ) -> Callable[..., Awaitable[Any]]:
        """Calls of methods of what the actor owns, by its method `run(target, method, arguments, named)`. They are
        repeated while the actor restarts, so such a method may be called again.

        A call raises what the method raises; `away`, with `subject` in its message: no answer within `bound_s`.

        Args:
            target: the URL of a database, a folder.
            subject: the actor.
        """

        async def call(method: str, *arguments: Any, **named: Any) -> Any:
            try:
                async with asyncio.timeout(bound_s):
                    while True:
                        try:
                            return await self.call("run", target, method, arguments, named)
                        except RayTaskError:
                            raise
                        except RayError as error:
                            logger.info("Call to %s got no answer (%s) and is repeated", subject, type(error).__name__)
                        await asyncio.sleep(ACTOR_RETRY_S)
            except RayTaskError as error:
                raise error.cause from None
            except TimeoutError:
                raise away(f"{subject} has not answered within {bound_s:g} s", retry_after_s=1.0) from None

        return call


def restart_as(release: str) -> None:
    """End this actor's process, if another release than its own is installed here and is the one asked for: Ray starts
    it again with the code on the disk, and it goes on as after a death."""
    if RELEASE != release == importlib.metadata.version(DISTRIBUTION):
        logger.info("Actor of release %s restarts as release %s", RELEASE, release)
        os.kill(os.getpid(), signal.SIGKILL)  # Ray restarts no actor that exits by itself


def existing(name: str) -> ActorHandle[Any]:
    """The actor of this name. Raises ValueError: there is none."""
    found: ActorHandle[Any] = ray.get_actor(name, namespace=NAMESPACE)
    return found


def claimed(name: str, actor_class: type[Any], *arguments: Any, outlives: bool, calls: int) -> ActorHandle[Any] | None:
    """A new actor on the head node that nobody restarts; None: the name is taken. The GCS gives a name once, so whoever
    has the actor has what the name stands for, until the actor has ended.

    Args:
        arguments: of its constructor.
        outlives: it goes on after the job that makes it.
        calls: at once.
    """
    life = {"namespace": NAMESPACE, "lifetime": "detached" if outlives else None, "max_restarts": 0}
    made: Any = ray.remote(actor_class).options(name=name, max_concurrency=calls, **_PLACE, **life)
    try:
        return made.remote(*arguments)  # type: ignore[no-any-return]
    except ActorAlreadyExistsError:
        return None


def end_head_actors() -> None:
    """End all these actors: the next application may need other settings of them."""
    for name in (*HEAD_ACTORS, DEPLOYMENT_ACTOR):
        with contextlib.suppress(ValueError, RayError):  # there is no actor, or Ray has ended
            ray.kill(existing(name))
