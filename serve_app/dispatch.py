"""One model as a router sees it: its line, its replicas, and what leads a request from one to the other.

`serve_app.local_line` decides, `serve_app.waiters` tells those who wait, `serve_app.replica_set` has the replicas and
their channels, `serve_app.attempts` takes a request there. Here they are put together.

Invariant: a slot granted is given back exactly once, however the request ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping

from serve_app.aim import Key
from serve_app.asking import Asking
from serve_app.attempts import Attempts, Make, Relay
from serve_app.channel import Unread
from serve_app.core.admission import Action, Arrival, ClassBound, Policy, QueueStatus, TenantPolicy
from serve_app.core.waiting.events import ReplicaUse
from serve_app.doorbell import Doorbell
from serve_app.engine.protocol import EngineInfo, EngineLoad
from serve_app.errors import NotFound, Unavailable
from serve_app.health import Health
from serve_app.local_line import Decider, LocalLine
from serve_app.replica_set import ReplicaSet
from serve_app.serve_adapter import Handle
from serve_app.settings import AdmissionSettings, ModelSettings
from serve_app.shared_line import SharedLine
from serve_app.trail import Trail
from serve_app.types import RequestClass
from serve_app.waiters import Granted, Waiters

__all__ = ["Granted", "ModelLine", "Relay"]

logger = logging.getLogger("ray.serve")


def _policy(admission: AdmissionSettings) -> Policy:
    return Policy(
        max_queued=admission.max_queued,
        max_wait_s=admission.max_wait_s,
        no_replica_wait_s=admission.no_replica_wait_s,
        max_queued_tokens=admission.max_queued_tokens,
        classes={
            RequestClass[name.upper()]: ClassBound(bound.max_queued, bound.max_queued_tokens)
            for name, bound in admission.classes.items()
        },
        tenants={name: TenantPolicy(tenant.weight, tenant.share) for name, tenant in admission.tenants.items()},
        trickle_share=admission.trickle_share,
        headroom_share=admission.headroom_share,
    )


def _initial_slots(model: ModelSettings, routers: int) -> int:
    return max(1, model.max_num_seqs // routers)


class ModelLine:
    """The line, the replicas and the channels of one model, for one router replica.

    Args:
        model: the model's settings.
        handle: its engine deployment.
        admission: bounds of the line.
        router_id: this router's name.
        routers: how many router replicas share the engines until the engines say so themselves.
        shared: the line of all routers; None: this router has one of its own (no quota actor, in tests and programs
            of one router).
        unread: what all requests of this router have not read; None: this line's are all.
    """

    def __init__(
        self,
        model: ModelSettings,
        handle: Handle,
        admission: AdmissionSettings,
        router_id: str,
        routers: int,
        shared: SharedLine | None = None,
        unread: Unread | None = None,
    ) -> None:
        self.model = model
        self._admission = admission
        self._handle = handle
        self.unread = Unread() if unread is None else unread
        self._shared = shared
        self._waiters = Waiters()
        policy = _policy(admission)
        self.line: Decider = (
            LocalLine(policy, self._perform)
            if shared is None
            else shared.of(model.name, policy, self._perform, self._alive, self._waiters.lost)
        )
        self._replicas = ReplicaSet(
            handle, router_id, _initial_slots(model, routers), self.line.replica, self._forgotten, self.unread
        )
        self._replicas.probe_slots = model.long_weight
        self._asking = Asking(model.name, handle, self._any_replica, lambda info: self.line.start_told(info.start_s))
        self._attempts = Attempts(self._replicas, self.slot, self._give_back, lambda: self._asking.known, self.line)
        self._bell = Doorbell(model.name, handle.ring)
        self._start_s: float | None = None  # what the last start took that was looked at
        self._empty: asyncio.Event | None = None  # set once the last request of a line that closes has ended
        self._serving = 0

    async def start(self) -> None:
        """Follow the replica set; returns once the first one is known."""
        await self._handle.watch(self._replicas_changed)
        self.line.open()

    def configure(self, model: ModelSettings, admission: AdmissionSettings, routers: int) -> None:
        """Take over changed settings. They hold for who waits, too; a smaller line refuses nobody who is in it."""
        self.model, self._admission = model, admission
        self._replicas.initial_slots, self._replicas.probe_slots = _initial_slots(model, routers), model.long_weight
        self.line.configure(_policy(admission))

    async def close(self) -> None:
        """The model is gone: tell everybody who waits, let finish what runs, then let go of the engines."""
        self._empty = asyncio.Event()
        self._waiters.dismiss(self.line, self._gone)
        await self._bell.close()
        if self._serving:
            await self._empty.wait()
        self.line.close()
        await self._handle.close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """A request from its arrival to its end, whatever it does in between."""
        self._check_open()
        self._serving += 1
        try:
            yield
        finally:
            self._serving -= 1
            if self._empty is not None and not self._serving:
                self._empty.set()

    def _gone(self) -> NotFound:
        return NotFound(
            f"the model {self.model.name!r} was taken out of service", param="model", code="model_not_found"
        )

    def _check_open(self) -> None:
        """Raises NotFound once the model is gone: nothing new is begun, and what lost its replica has no other."""
        if self._empty is not None:
            raise self._gone()

    @property
    def waiting(self) -> int:
        """Requests that wait, in the line, for any replica at all, or to try again."""
        return self.line.waiting + self._bell.aside + self._attempts.pausing

    @property
    def granted(self) -> int:
        """Requests on replicas."""
        return self.line.granted

    @property
    def blocked(self) -> int:
        """Replicas of the model that wait for memory."""
        return 0 if self._shared is None else self._shared.blocked.get(self.model.name, 0)

    @property
    def ready(self) -> bool:
        """Whether a replica runs."""
        return bool(self._replicas.running)

    @property
    def replicas(self) -> frozenset[str]:
        return self._replicas.running

    @property
    def largest(self) -> int:
        """The most slots that one request can have."""
        whole = None if self._shared is None else self._asking.known
        return self._replicas.largest if whole is None else whole.slots

    @property
    def use(self) -> Mapping[str, ReplicaUse]:
        """See `ReplicaSet.use`."""
        return self._replicas.use()

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt and answer together, in tokens; None while no engine has told."""
        return self._asking.known.max_model_len if self._asking.known is not None else self.model.max_model_len

    @property
    def kv_block_tokens(self) -> int:
        """What prefixes are cached in; 1 while no engine has told."""
        return 1 if self._asking.known is None else self._asking.known.kv_block_tokens

    @property
    def health(self) -> Health:
        """Which replicas have failed."""
        return self._replicas.health

    @property
    def placed(self) -> Mapping[tuple[str, str], int]:
        """Requests granted, by what key they have and how their replica was found."""
        return self._attempts.placed

    def status(self, request_id: str) -> QueueStatus | None:
        """Where a request stands in the line; None: it does not wait there."""
        return self.line.status(request_id)

    async def info(self) -> EngineInfo | None:
        """What the model's engines can do; None while none has been asked with success."""
        return await self._asking.info() if self._asking.known is None and self.ready else self._asking.known

    async def load(self, replica_id: str) -> EngineLoad | None:
        """Live figures of one engine; None when it does not answer in time."""
        return await self._asking.load(replica_id)

    async def serve(
        self,
        arrival: Arrival,
        make: Make,
        relay: Relay,
        key: Key | None = None,
        trail: Trail | None = None,
    ) -> None:
        """Wait, hand in, and give the stream with its first frames to `relay`.

        It goes where requests of its key go, if there is room.

        A replica lost before its first frame costs the client nothing: the request waits again, as long as anyone may
        wait. Raises as `slot`, and `EngineFailed` when the replica fails under `relay` or engines keep dying.
        """
        wait_s = self._admission.max_wait_s
        trail = Trail() if trail is None else trail
        with self._counted():
            trail.ahead = self.line.ahead(arrival.request_class)
            await self._attempts.in_line(arrival, key, make, relay, wait_s, self._check_open, trail)

    async def serve_aside(self, make: Make, relay: Relay, trail: Trail | None = None) -> None:
        """The same for work that takes no slot (tokenizing): any running replica, at once; without one, the next."""
        with self._counted():
            trail = Trail() if trail is None else trail
            await self._attempts.aside(make, relay, self._admission.max_wait_s, self._next_replica, trail)

    @contextlib.asynccontextmanager
    async def slot(self, arrival: Arrival) -> AsyncIterator[Granted]:
        """Wait in the line; the slot is held for the block.

        Raises:
            Overloaded, Unavailable: refused, with the reason and Retry-After.
        """
        granted = await self._waiters.granted(self.line, arrival)
        try:
            self._replicas.took(arrival.request_id, granted.replica_id, arrival.slots)
            yield granted
        finally:
            self._give_back(arrival.request_id)

    def _give_back(self, request_id: str, output_tokens: int | None = None, prompt_tokens: int | None = None) -> None:
        """End a grant; the first call for it counts. A replica is done with a request before its slowest reader is."""
        try:
            self._replicas.gave(request_id)
        finally:
            self.line.done(request_id, output_tokens, prompt_tokens)
        self._replicas.forget_gone()

    def _alive(self) -> dict[str, bool]:
        """This router's requests in the line, and whether each holds a place."""
        return self._waiters.alive() | dict.fromkeys(self._replicas.held, True)

    def _any_replica(self) -> str:
        replica_id = self._replicas.any()
        if replica_id is None:
            start_s = self.line.expected_start_s()
            raise Unavailable(f"no replica of {self.model.name} is running", retry_after_s=start_s)
        return replica_id

    async def _next_replica(self) -> str:
        """Any replica; the first one to come while there is none."""
        await self._bell.hold(self._admission.no_replica_wait_s, self._admission.max_queued)
        self._check_open()
        return self._any_replica()

    def _perform(self, actions: list[Action]) -> None:
        """Every event of the line ends here, so that what depends on its state follows it."""
        self._waiters.perform(actions)
        self._follow()

    def _follow(self) -> None:
        from_zero = not self.model.replicas.min_replicas
        self._bell.update(from_zero=from_zero, running=self.ready, in_line=self.line.waiting)

    def _replicas_changed(self, names: frozenset[str]) -> None:
        new = names - self._replicas.running
        self._replicas.change(names)
        self._follow()
        self._look_at_start()
        if new:
            self._asking.refresh()

    def _forgotten(self, replica_id: str) -> None:
        self.line.replica_gone(replica_id)

    def _look_at_start(self) -> None:
        """Tell the operator, once a start, when requests are refused sooner than a replica can come."""
        start_s = self.line.start_s
        if start_s is None or start_s == self._start_s:
            return
        self._start_s = start_s
        held_s = min(self._admission.no_replica_wait_s, self._admission.max_wait_s)
        if start_s > held_s:
            logger.warning(
                "%s: a replica came %.0f s after the first request for one; requests are refused after %.0f s. Set "
                "admission.no_replica_wait_s and max_wait_s above the first figure, or min_replicas to 1",
                self.model.name,
                start_s,
                held_s,
            )
