"""Engine replicas in the router's own process: `EngineReplica` on the simulated engine, behind a router's `Handle`.

A call awaits the replica's coroutine, and the channel is a connection on loopback, so a request costs no more than the
router's and the engine replica's own work. A replica that is lost ends its connections and is never heard of again.
The engines are production's simulated ones, and not those of `autoscaling.simulator`: what is measured is the memory
that the real router and replica keep of each request, which a world in virtual time has not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorUnavailableError

from serve_app.engine import deployment
from serve_app.ray_adapter import Handle
from serve_app.settings import ModelSettings
from serve_app.transport import TcpServer

LOOPBACK = "127.0.0.1"
NO_ACTOR = bytes(16)  # the actor id in Ray's errors


class NearEngines(Handle):
    """The replicas of one model, and the handle of the one router that uses them."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._replicas: dict[str, deployment.EngineReplica] = {}
        self._names = itertools.count(1)
        self._listener: Callable[[frozenset[str]], None] | None = None

    async def add(self) -> str:
        """Start a replica, of a name that none had before."""
        engine = deployment.EngineReplica.__new__(deployment.EngineReplica)
        await deployment.EngineReplica.__init__(engine, self._settings.model_dump(mode="json"))
        engine.server = TcpServer(engine.run, engine.produced, LOOPBACK)
        engine.server.set_slots(engine.engine_info.slots)
        name = f"engine-{next(self._names)}"
        self._replicas[name] = engine
        self._tell()
        return name

    async def lose(self, name: str) -> None:
        """It dies with all that it runs."""
        engine = self._replicas.pop(name)
        self._tell()
        await engine.shutdown()

    async def end(self) -> None:
        """All of them, once nobody uses them."""
        for name in list(self._replicas):
            await self.lose(name)

    async def watch(self, listener: Callable[[frozenset[str]], None]) -> None:
        self._listener = listener
        listener(frozenset(self._replicas))

    async def call(self, method: str, *arguments: Any, replica_id: str) -> Any:
        engine = self._replicas.get(replica_id)
        if engine is None:
            raise ActorUnavailableError(f"replica {replica_id} is unavailable", NO_ACTOR)
        return await getattr(engine, method)(*arguments, replica_id=replica_id)

    async def call_any_replica(self) -> None:
        """No router here scales from zero."""
        raise NotImplementedError

    async def close(self) -> None:
        self._listener = None

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(frozenset(self._replicas))
