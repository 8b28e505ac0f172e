"""One model in one router: its queue, its replicas, and the requests that go from one to the other.

`serve_app.router.model_queue` decides, `serve_app.router.replicas` has the replicas and their channels,
`serve_app.router.retries` takes a request there. Here they are put together and follow the settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping

from serve_app.core.queue import Arrival, ClassBound, Policy, QueueStatus, ReplicaUse, TenantPolicy
from serve_app.core.routing import Key
from serve_app.errors import NotFound, Unavailable
from serve_app.ray_adapter import Handle
from serve_app.router.cold_start import Doorbell
from serve_app.router.engine_info import Asking
from serve_app.router.health import Health
from serve_app.router.model_queue import ModelQueue, QueueView
from serve_app.router.queue_client import QueueClient
from serve_app.router.replicas import ReplicaSet
from serve_app.router.request_grant import RequestGrant
from serve_app.router.request_trace import RequestTrace
from serve_app.router.retries import Attempts, Make, Relay
from serve_app.settings import AdmissionSettings, ModelSettings
from serve_app.transport import EngineInfo, EngineLoad, Unread
from serve_app.types import RequestClass

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


class ModelRouter:
    """The queue, the replicas and the channels of one model, for one router replica.

    Args:
        settings: of the model.
        handle: its engine deployment.
        admission: bounds of the queue.
        router_id: this router's name.
        routers: how many router replicas share the engines.
        client: of the queues of all models.
        unread: what all requests of this router have not read; None: this model's are all.
    """

    def __init__(
        self,
        settings: ModelSettings,
        handle: Handle,
        admission: AdmissionSettings,
        router_id: str,
        routers: int,
        client: QueueClient,
        unread: Unread | None = None,
    ) -> None:
        self.settings = settings
        self._admission = admission
        self._handle = handle
        self.unread = Unread() if unread is None else unread
        self.queue = ModelQueue(client, settings.name, _policy(admission))
        self._replicas = ReplicaSet(handle, router_id, self.queue, settings.max_num_seqs, routers, self.unread)
        self._asking = Asking(
            settings.name, handle, self._any_replica, lambda info: self.queue.start_told(info.start_s)
        )
        self._bell = Doorbell(settings.name, handle.ring)
        self._attempts = Attempts(self.queue, self._replicas, self._bell, lambda: self._asking.known, self._check_open)
        self._start_s: float | None = None  # what the last start took that was looked at
        self._empty: asyncio.Event | None = None  # set once the last request of a model that leaves has ended
        self._serving = 0

    async def start(self) -> None:
        """Follow the replica set; returns once the first one is known."""
        await self._handle.watch(self._replicas_changed)
        self._follow()
        self.queue.open()

    def configure(self, settings: ModelSettings, admission: AdmissionSettings, routers: int) -> None:
        """Take over changed settings. They hold for requests that wait, too; a smaller queue refuses none of them."""
        self.settings, self._admission = settings, admission
        self._replicas.configure(settings.max_num_seqs, routers)
        self.queue.configure(_policy(admission))
        self._follow()

    async def close(self) -> None:
        """The model is gone: tell everybody who waits, let finish what runs, then let go of the engines."""
        self._empty = asyncio.Event()
        self.queue.dismiss(self._gone)
        await self._bell.close()
        if self._serving:
            await self._empty.wait()
        self.queue.close()
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
            f"the model {self.settings.name!r} was taken out of service", param="model", code="model_not_found"
        )

    def _check_open(self) -> None:
        """Raises NotFound once the model is gone: nothing new is begun, and what lost its replica has no other."""
        if self._empty is not None:
            raise self._gone()

    @property
    def waiting(self) -> int:
        """Requests that wait, in the line, for any replica at all, or to try again."""
        return self.queue.waiting + self._bell.aside + self._attempts.pausing

    @property
    def granted(self) -> int:
        """Requests on replicas."""
        return self.queue.granted

    @property
    def blocked(self) -> int:
        """Replicas of the model that wait for memory."""
        return self.queue.blocked

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
        return self.settings.max_num_seqs if self._asking.known is None else self._asking.known.slots

    @property
    def use(self) -> Mapping[str, ReplicaUse]:
        """See `ReplicaSet.use`."""
        return self._replicas.use()

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt and answer together, in tokens; None while no engine has told."""
        return self._asking.known.max_model_len if self._asking.known is not None else self.settings.max_model_len

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
        return self.queue.status(request_id)

    async def info(self) -> EngineInfo | None:
        """What the model's engines can do; None while none has been asked with success."""
        return await self._asking.info() if self._asking.known is None and self.ready else self._asking.known

    async def load(self, replica_id: str) -> EngineLoad | None:
        """Live figures of one engine; None when it does not answer in time."""
        return await self._asking.load(replica_id)

    def view(self) -> QueueView:
        """This router's part of the queue, in figures."""
        return self.queue.view()

    async def serve(
        self,
        arrival: Arrival,
        make: Make,
        relay: Relay,
        key: Key | None = None,
        trace: RequestTrace | None = None,
    ) -> None:
        """Wait, hand in, and give the stream with its first frames to `relay`.

        A replica lost before its first frame costs the client nothing: the request waits again, as long as anyone may
        wait. Raises as `Attempts.queued`.
        """
        trace = RequestTrace() if trace is None else trace
        with self._counted():
            trace.ahead = self.queue.ahead(arrival.request_class)
            await self._attempts.queued(arrival, key, make, relay, self._admission.max_wait_s, trace)

    async def serve_aside(self, make: Make, relay: Relay, trace: RequestTrace | None = None) -> None:
        """The same for work that takes no slot (tokenizing): any running replica, at once; without one, the next."""
        trace = RequestTrace() if trace is None else trace
        with self._counted():
            await self._attempts.aside(make, relay, self._admission.max_wait_s, self._next_replica, trace)

    async def acquire(self, arrival: Arrival) -> RequestGrant:
        """See `Attempts.acquire`."""
        return await self._attempts.acquire(arrival)

    def _any_replica(self) -> str:
        replica_id = self._replicas.any()
        if replica_id is None:
            start_s = self.queue.expected_start_s()
            raise Unavailable(f"no replica of {self.settings.name} is running", retry_after_s=start_s)
        return replica_id

    async def _next_replica(self) -> str:
        """Any replica; the first one to come while there is none."""
        await self._bell.hold(self._admission.no_replica_wait_s, self._admission.max_queued)
        self._check_open()
        return self._any_replica()

    def _follow(self) -> None:
        self._bell.update(from_zero=not self.settings.replicas.min_replicas, running=self.ready)

    def _replicas_changed(self, names: frozenset[str]) -> None:
        new = names - self._replicas.running
        self._replicas.change(names)
        self._follow()
        self._look_at_start()
        if new:
            self._asking.refresh()

    def _look_at_start(self) -> None:
        """Tell the operator, once a start, when requests are refused sooner than a replica can come."""
        start_s = self.queue.start_s
        if start_s is None or start_s == self._start_s:
            return
        self._start_s = start_s
        held_s = min(self._admission.no_replica_wait_s, self._admission.max_wait_s)
        if start_s > held_s:
            logger.warning(
                "%s: a replica came %.0f s after the first request for one; requests are refused after %.0f s. Set "
                "admission.no_replica_wait_s and max_wait_s above the first figure, or min_replicas to 1",
                self.settings.name,
                start_s,
                held_s,
            )
