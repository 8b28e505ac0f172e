"""Engine replicas without Ray: real `EngineReplica` objects on simulated engines, and a stand-in for `Handle`.

Connections between routers and replicas are production's, on loopback. What the stand-in keeps of Serve's calls:
arguments, results and errors travel pickled; a call reaches its replica some turns of the event loop after it was made
and never reaches one outside the running set; cancelling a call cancels its coroutine on the replica, later; a
cancellation that happens on the replica arrives at the caller as a CancelledError; a killed replica fails every open
call with `ActorUnavailableError`, and later ones wait until the replica leaves the set, and after.

Invariant: `run` fails a scenario that leaves a task, an open call or connection, work in an engine or an unhandled
exception behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import pickle
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from unittest import mock

from ray.exceptions import ActorUnavailableError

from serve_app.core.routing import outliers
from serve_app.engine import deployment
from serve_app.engine.deployment import EngineReplica
from serve_app.engine.simulated import SimulatedEngine
from serve_app.http.keyed import runs
from serve_app.router import QueueClient
from serve_app.settings import ModelSettings, SimulatedSettings
from serve_app.transport import EngineLoad, Frame, Submit, channel
from serve_app.transport.tcp_server import RunRequest
from tests.fakes import quota as fake_quota
from tests.fakes.quota import MODEL, SOON_S, FakeQuota
from tests.fakes.until import POLL_S, TURNS, turns, until
from tests.fakes.virtual_time import TURN_S, virtual_runner

BOUND_S = 60.0  # of one scenario, against hanging: they take under 2 s, many times that on a machine that is busy
SETTLE_S = 5.0  # within which everything must have ended after a scenario; the short waits below add up to 0.5 s
LOOPBACK = "127.0.0.1"
NO_ACTOR = bytes(16)  # the actor id in Ray's errors

# Production's waits are a second and several in a row: the scenarios run the same code with these.
WAITS = {
    (runs, "RUN_GRACE_S"): 0.1,
    (channel, "IDLE_CLOSE_S"): 0.05,
    (outliers, "FIRST_EJECTION_S"): 0.1,
}


def model(slots: int = 4, step_s: float = 0.001, **changes: Any) -> ModelSettings:
    """A simulated model; `slots` per replica, `step_s` per token."""
    simulated = SimulatedSettings(decode_step_s=step_s, prefill_tokens_per_s=1e9)
    return ModelSettings(name=MODEL, engine="simulated", max_num_seqs=slots, simulated=simulated, **changes)


class FakeReplica:
    """One engine replica and the calls open on it."""

    def __init__(self, name: str, engine: EngineReplica) -> None:
        self.name = name
        self.engine = engine
        self.calls: dict[asyncio.Future[None], str] = {}  # open calls and their methods; failed when the replica dies
        self.ended: list[str] = []  # methods of the calls that have ended, in order
        self.dead = False
        self.mute = False  # whether who asks for a channel is never answered
        self.stands_still = False
        self._thawed = asyncio.Event()
        self._thawed.set()
        if isinstance(engine.backend, SimulatedEngine):
            engine.backend.sleep = self._sleep
            engine.backend.clock = time.monotonic  # that of the scenario's loop

    async def _sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)  # bound: one step of the engine
        await self._thawed.wait()

    def freeze(self) -> None:
        """Run no further step until `thaw`, like a hung engine."""
        self._thawed.clear()

    def thaw(self) -> None:
        self.stands_still = False
        self._thawed.set()

    def stand_still(self) -> None:
        """Do nothing more with what comes over its connections, which stay open, and answer no call; the engine is
        frozen."""
        self.freeze()
        self.stands_still = True
        for visitor in self.engine.server.connections:
            visitor.framing.on_message = lambda message: None

    @property
    def connections(self) -> int:
        """Of routers."""
        return len(self.engine.server.connections)

    @property
    def load(self) -> EngineLoad:
        return self.engine.backend.load()

    @property
    def work(self) -> int:
        """Sequences in the engine, running or waiting."""
        return self.load.running + self.load.waiting

    def count(self, method: str) -> int:
        return list(self.calls.values()).count(method)

    def fail_calls(self, *methods: str) -> None:
        """Lose the open calls of these methods on both sides, or all of them."""
        for lost, method in list(self.calls.items()):
            if (not methods or method in methods) and not lost.done():
                lost.set_exception(ActorUnavailableError(f"replica {self.name} is unavailable", NO_ACTOR))

    def cut_connections(self) -> None:
        """End its connections as the kernel does those of a process that is gone."""
        for visitor in list(self.engine.server.connections):
            visitor.framing.abort()

    @contextlib.contextmanager
    def open_call(self, method: str) -> Any:
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls[lost] = method
        try:
            yield lost
        finally:
            del self.calls[lost]
            self.ended.append(method)
            if lost.done():
                lost.exception()  # retrieved: the caller may have gone away in the same turn


class FakeCluster:
    """The replicas of one model, and the quota actor. `running` is what Serve tells the routers."""

    def __init__(self, settings: ModelSettings, quota: FakeQuota | None = None) -> None:
        self.settings = settings
        self.quota = FakeQuota({}) if quota is None else quota
        self._clients: list[QueueClient] = []
        self.closing: list[Callable[[], None]] = []  # of routers: called when the scenario is over
        self._routers: set[str] = set()
        self._beside: dict[str, FakeCluster] = {}
        self.replicas: dict[str, FakeReplica] = {}
        self.running: frozenset[str] = frozenset()
        self.submits: list[str] = []  # the replica of every request that reached one
        self._listeners: list[Callable[[frozenset[str]], None]] = []

    def __getitem__(self, name: str) -> FakeReplica:
        return self.replicas[name]

    async def add(self, *names: str) -> None:
        """Start replicas and count them as running."""
        for name in names:
            if name not in self.replicas:
                engine = EngineReplica.__new__(EngineReplica)
                await EngineReplica.__init__(engine, self.settings.model_dump(mode="json"))
                self.replicas[name] = FakeReplica(name, engine)
                engine.server.run = self._recorded(name, engine.run)
                reported = self.settings.max_num_seqs, self.settings.name, engine.server.fingerprint
                self.quota.engine_comes(name, *reported)
        self._tell(self.running | set(names))

    def _recorded(self, name: str, run: RunRequest) -> RunRequest:
        """Requests as they reach the replica are in `submits`."""

        async def recorded(submit: Submit, put: Callable[[Frame], None]) -> None:
            self.submits.append(name)
            await run(submit, put)

        return recorded

    def remove(self, *names: str) -> None:
        """Count replicas no longer as running; open calls go on, new ones do not reach them."""
        self._tell(self.running - set(names))

    def kill(self, name: str, *, reported: bool = True) -> None:
        """Lose a replica with all its open calls; `told`: Serve notices at once."""
        self.replicas[name].dead = True
        self.replicas[name].fail_calls()
        self.replicas[name].cut_connections()
        if name in self.quota.slots:
            self.quota.engine_ends(name)
        if reported:
            self.remove(name)

    def break_channels(self, name: str) -> None:
        """Lose the channels to a replica, and nothing else of it."""
        self.replicas[name].cut_connections()

    def handle(self) -> FakeHandle:
        """What a router calls the replicas with."""
        return FakeHandle(self)

    def beside(self, settings: ModelSettings) -> FakeCluster:
        """The replicas of another model, with the same quota actor; their names have to be others."""
        if settings.name not in self._beside:
            self._beside[settings.name] = FakeCluster(settings, self.quota)
        return self._beside[settings.name]

    async def queues(self, router: str) -> QueueClient:
        """The queues of a router of this name, which the actor knows."""
        name = f"{router} {len(self._clients)}" if router in self._routers else router
        self._routers.add(name)
        client = QueueClient(name, self.quota.exchange, self.quota.watch)
        self._clients.append(client)
        await client.start()
        await until(lambda: not client.core.alone, SOON_S, "the actor knows the router")
        return client

    def listen(self, listener: Callable[[frozenset[str]], None]) -> None:
        self._listeners.append(listener)
        asyncio.get_running_loop().call_soon(listener, self.running)

    def idle(self) -> bool:
        """Whether no call is open and no engine that lives has work, a connection or a cached token in use."""
        alive = [replica for replica in self.replicas.values() if not replica.dead]
        if any(replica.calls for replica in self.replicas.values()):
            return False
        busy = (replica.work or replica.connections or replica.load.kv_cache_usage for replica in alive)
        return not any(busy) and all(one.idle() for one in self._beside.values())

    async def stop_engines(self) -> None:
        """The engines end, and their replicas go on."""
        for replica in self.replicas.values():
            await replica.engine.shutdown()

    async def close(self) -> None:
        for cluster in (self, *self._beside.values()):
            for close in cluster.closing:
                close()
            await cluster.stop_engines()
        for client in self._clients:
            await client.stop()
        await self.quota.close()

    def _tell(self, names: frozenset[str]) -> None:
        self.running = names
        for listener in self._listeners:
            asyncio.get_running_loop().call_soon(listener, names)


class FakeHandle:
    """Stands in for `serve_app.ray_adapter.Handle`, in one event loop."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.calls: list[tuple[str, str]] = []  # (method, replica) of every call made
        self.rings = self.ringing = 0  # calls of `ring` made, and those that wait
        self.turns: Callable[[str], int] = lambda method: TURNS  # how long the next thing for this call is on its way

    async def close(self) -> None:
        """Nothing is kept open."""

    async def watch(self, listener: Callable[[frozenset[str]], None]) -> None:
        await turns()
        self._cluster.listen(listener)
        await turns()

    async def call(self, method: str, *arguments: Any, replica_id: str) -> Any:
        """A unary call, as `Handle.call`."""
        replica = await self._reach(method, replica_id)
        with replica.open_call(method) as lost:
            mute = replica.stands_still or (replica.mute and method == "open_wire")
            made = _never() if mute else getattr(replica.engine, method)(*_copy(arguments), replica_id=replica_id)
            task = _elsewhere(made)
            try:
                await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                self._cancel(task, method)
                raise
            if lost.done():
                task.cancel()
                return lost.result()
            await turns(self.turns(method))
            if task.cancelled():
                raise asyncio.CancelledError
            error = task.exception()
            if error is not None:
                raise _copy(error)
            return _copy(task.result())

    async def call_any_replica(self) -> None:
        """A call that any replica answers, as `Handle.call_any_replica`."""
        self.rings += 1
        self.ringing += 1
        try:
            while True:
                await asyncio.sleep(POLL_S)  # bound: the caller's timeout, as with Serve
                if self._cluster.running:
                    break
            await turns(self.turns("info"))
            if all(self._cluster[name].dead for name in self._cluster.running):
                raise ActorUnavailableError("the replica is unavailable", NO_ACTOR)
        finally:
            self.ringing -= 1

    async def _reach(self, method: str, replica_id: str) -> FakeReplica:
        """Be sent on to the replica; never, while it is dead or outside the set: Serve keeps trying."""
        self.calls.append((method, replica_id))
        await turns(self.turns(method))
        while True:
            replica = self._cluster.replicas.get(replica_id)
            if replica is not None and not replica.dead and replica_id in self._cluster.running:
                return replica
            await asyncio.sleep(POLL_S)  # bound: the caller's timeout, as with Serve

    def _cancel(self, task: asyncio.Task[Any], method: str) -> None:
        """Cancel a coroutine on the replica once the news has got there."""

        async def later() -> None:
            await turns(self.turns(method))
            task.cancel()
            await asyncio.wait({task})

        _elsewhere(later())


def _copy(value: Any) -> Any:
    """As it comes out at the other end."""
    return pickle.loads(pickle.dumps(value))


def _elsewhere(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task on the other side of the transport."""
    return asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())


async def _never() -> None:
    await asyncio.Event().wait()


def run(
    scenario: Callable[[FakeCluster], Awaitable[Any]],
    settings: ModelSettings | None = None,
    *,
    waits: dict[Any, float] | None = None,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    bound_s: float = BOUND_S,
) -> Any:
    """Run a scenario on a cluster without replicas; then everything must end by itself within `SETTLE_S`.

    Args:
        settings: the model; `model()` by default.
        waits: constants to set, over `WAITS`.
        loop: makes the event loop, with the clock of the wall; by default it is that of `virtual_time`.
        bound_s: of the scenario.
    """
    with contextlib.ExitStack() as patches:
        for (module, name), seconds in (fake_quota.WAITS | WAITS | (waits or {})).items():
            patches.enter_context(mock.patch.object(module, name, seconds))
        patches.enter_context(mock.patch.object(deployment.ray.util, "get_node_ip_address", return_value=LOOPBACK))
        with virtual_runner(TURN_S) if loop is None else asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(_checked(scenario, settings or model(), bound_s))


async def _checked(scenario: Callable[[FakeCluster], Awaitable[Any]], settings: ModelSettings, bound_s: float) -> Any:
    loop = asyncio.get_running_loop()
    unhandled: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    cluster = FakeCluster(settings)
    async with asyncio.timeout(bound_s):
        result = await scenario(cluster)
        await until(cluster.idle, SETTLE_S, "no call open, nothing in the engines, no connection open")
        await cluster.close()
        await until(lambda: len(asyncio.all_tasks()) == 1, SETTLE_S, "no task left")
    gc.collect()  # a task or future whose error nobody has looked at says so when it is collected
    await turns()
    assert not unhandled, unhandled
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return result
