"""Engine replicas in the router's own process: `EngineReplica` on the simulated engine, behind a router's `Handle`.

What travels is not copied: a call awaits the replica's coroutine and the channel's messages are handed on as they come,
so a request costs no more than the router's and the engine replica's own work. A replica that is lost breaks its
channel with the error that Ray raises, and is never heard of again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorUnavailableError

from serve_app.engine import deployment
from serve_app.settings import ModelSettings

NO_ACTOR = bytes(16)  # the actor id in Ray's errors


class _Engine(deployment.EngineReplica):
    """One that the garbage collector leaves alone: Serve awaits its `__del__`, so do we."""

    def __del__(self) -> None:  # type: ignore[override]
        pass

    async def end(self) -> None:
        await deployment.EngineReplica.__del__(self)


class _Replica:
    def __init__(self, engine: _Engine) -> None:
        self.engine = engine
        self.lost = False
        self.channels: set[asyncio.Task[None]] = set()


class NearEngines:
    """The replicas of one model, and the handle of the one router that uses them
    (`serve_app.ray_adapter.serve.Handle`)."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._replicas: dict[str, _Replica] = {}
        self._names = itertools.count(1)
        self._listener: Callable[[frozenset[str]], None] | None = None

    async def add(self) -> str:
        """Start a replica, of a name that none had before."""
        engine = _Engine.__new__(_Engine)
        await _Engine.__init__(engine, self._settings.model_dump(mode="json"))
        name = f"engine-{next(self._names)}"
        self._replicas[name] = _Replica(engine)
        self._tell()
        return name

    async def lose(self, name: str) -> None:
        """It dies with all that it runs."""
        replica = self._replicas.pop(name)
        replica.lost = True
        for channel in replica.channels:
            channel.cancel()
        self._tell()
        await replica.engine.end()

    async def end(self) -> None:
        """All of them, once nobody uses them."""
        for name in list(self._replicas):
            await self.lose(name)

    async def watch(self, listener: Callable[[frozenset[str]], None]) -> None:
        self._listener = listener
        listener(frozenset(self._replicas))

    async def call(self, method: str, *arguments: Any, replica_id: str) -> Any:
        return await getattr(self._replica(replica_id).engine, method)(*arguments, replica_id=replica_id)

    async def attach(self, router_id: str, on_message: Callable[[bytes], None], *, replica_id: str) -> None:
        replica = self._replica(replica_id)
        channel = asyncio.create_task(_pump(replica.engine, router_id, on_message, replica_id))
        replica.channels.add(channel)
        try:
            await channel
        except asyncio.CancelledError:
            if replica.lost:
                raise _unavailable(replica_id) from None
            raise
        finally:
            replica.channels.discard(channel)

    async def call_any_replica(self) -> None:
        """No router here scales from zero."""
        raise NotImplementedError

    async def close(self) -> None:
        self._listener = None

    def _replica(self, replica_id: str) -> _Replica:
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise _unavailable(replica_id)
        return replica

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(frozenset(self._replicas))


def _unavailable(replica_id: str) -> ActorUnavailableError:
    return ActorUnavailableError(f"replica {replica_id} is unavailable", NO_ACTOR)


async def _pump(engine: _Engine, router_id: str, on_message: Callable[[bytes], None], replica_id: str) -> None:
    async with contextlib.aclosing(engine.attach(router_id, replica_id)) as messages:  # type: ignore[type-var]
        async for message in messages:
            on_message(message)
