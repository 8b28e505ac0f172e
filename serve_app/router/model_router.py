"""One model in one router: its queue, its replicas, and the requests that go from the queue to the replicas.

`serve_app.router.model_queue` grants, `serve_app.router.replicas` has the replicas and their channels, and
`serve_app.router.retries` runs a request on a replica. This module connects them and applies the settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping

from serve_app.core.queue import Arrival, ClassBound, QueuePolicy, QueueStatus, ReplicaUse, TenantPolicy
from serve_app.core.routing import AffinityKey
from serve_app.errors import NotFound, Unavailable
from serve_app.ray_adapter import Handle
from serve_app.router.cold_start import ColdStartTrigger
from serve_app.router.engine_info import EngineInfoClient
from serve_app.router.health import Health
from serve_app.router.model_queue import ModelQueue, QueueView
from serve_app.router.queue_client import QueueClient
from serve_app.router.replicas import ReplicaSet
from serve_app.router.request_grant import RequestGrant
from serve_app.router.request_trace import RequestTrace
from serve_app.router.retries import MakeSubmit, Relay, Retries
from serve_app.settings import AdmissionSettings, ModelSettings
from serve_app.transport import EngineInfo, EngineLoad, UnreadBytes
from serve_app.types import RequestClass

logger = logging.getLogger("ray.serve")


def queue_policy(admission: AdmissionSettings) -> QueuePolicy:
    return QueuePolicy(
        max_queued=admission.max_queued,
        max_wait_s=admission.max_wait_s,
        no_replica_wait_s=admission.no_replica_wait_s,
        max_queued_tokens=admission.max_queued_tokens,
        classes={
            RequestClass[name.upper()]: ClassBound(bound.max_queued, bound.max_queued_tokens)
            for name, bound in admission.classes.items()
        },
        tenants={name: TenantPolicy(tenant.weight, tenant.share) for name, tenant in admission.tenants.items()},
        min_share=admission.min_share,
        guard_slots_share=admission.guard_slots_share,
    )


class ModelRouter:
    """The queue, the replicas and the channels of one model, for one router replica.

    Args:
        settings: of the model.
        handle: its engine deployment.
        admission: bounds of the queue.
        router_id: this router's name.
        routers: how many router replicas share the engines.
        client: the queue client of all models.
        unread: counts unread bytes of all requests of this router; None: counts this model's alone.
    """

    def __init__(
        self,
        settings: ModelSettings,
        handle: Handle,
        admission: AdmissionSettings,
        router_id: str,
        routers: int,
        client: QueueClient,
        unread: UnreadBytes | None = None,
    ) -> None:
        self.settings = settings
        self._admission = admission
        self._handle = handle
        self.unread = UnreadBytes() if unread is None else unread
        self.queue = ModelQueue(client, settings.name, queue_policy(admission))
        self.replica_set = ReplicaSet(handle, router_id, self.queue, settings.max_num_seqs, routers, self.unread)
        self.engine_info = EngineInfoClient(
            settings.name, handle, self._any_replica, lambda info: self.queue.observe_start(info.start_s)
        )
        self.cold_start = ColdStartTrigger(settings.name, handle.call_any_replica)
        self._retries = Retries(
            self.queue, self.replica_set, self.cold_start, lambda: self.engine_info.cached, self._check_open
        )
        self._reported_start_s: float | None = None  # seconds of the last start that `_warn_slow_start` checked
        self._drained: asyncio.Event | None = None  # set once the last request of a closing model has ended
        self._active_requests = 0

    async def start(self) -> None:
        """Follow the replica set; returns once the first set is known."""
        await self._handle.watch(self._replicas_changed)
        self._update_cold_start()
        self.queue.open()

    def configure(self, settings: ModelSettings, admission: AdmissionSettings, routers: int) -> None:
        """Apply changed settings, also to waiting requests; a smaller queue refuses none of these."""
        self.settings, self._admission = settings, admission
        self.replica_set.configure(settings.max_num_seqs, routers)
        self.queue.configure(queue_policy(admission))
        self._update_cold_start()

    async def close(self) -> None:
        """Close a model that is gone: refuse waiting requests, wait for running ones, then release the engines."""
        self._drained = asyncio.Event()
        self.queue.refuse_all(self._not_found_error)
        await self.cold_start.close()
        if self._active_requests:
            await self._drained.wait()
        self.queue.close()
        await self._handle.close()

    @contextlib.contextmanager
    def _count_active(self) -> Iterator[None]:
        """Count a request from its arrival to its end."""
        self._check_open()
        self._active_requests += 1
        try:
            yield
        finally:
            self._active_requests -= 1
            if self._drained is not None and not self._active_requests:
                self._drained.set()

    def _not_found_error(self) -> NotFound:
        return NotFound(
            f"the model {self.settings.name!r} was taken out of service", param="model", code="model_not_found"
        )

    def _check_open(self) -> None:
        """Raises NotFound once the model is gone: no request begins, and one that lost its replica is not retried."""
        if self._drained is not None:
            raise self._not_found_error()

    @property
    def waiting(self) -> int:
        """Number of requests that wait: in the queue, for a first replica, or between two attempts."""
        return self.queue.waiting + self.cold_start.unqueued_waiting + self._retries.pausing

    @property
    def granted(self) -> int:
        """Number of requests on replicas."""
        return self.queue.granted

    @property
    def blocked(self) -> int:
        """Number of replicas of the model that wait for memory."""
        return self.queue.blocked

    @property
    def ready(self) -> bool:
        """Whether a replica runs."""
        return bool(self.replica_set.running)

    @property
    def replicas(self) -> frozenset[str]:
        return self.replica_set.running

    @property
    def max_request_slots(self) -> int:
        """The most slots that one request can have."""
        return self.settings.max_num_seqs if self.engine_info.cached is None else self.engine_info.cached.slots

    @property
    def slot_use(self) -> Mapping[str, ReplicaUse]:
        """See `ReplicaSet.slot_use`."""
        return self.replica_set.slot_use()

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt and answer together, in tokens; None while no engine has reported its limits."""
        return (
            self.engine_info.cached.max_model_len
            if self.engine_info.cached is not None
            else self.settings.max_model_len
        )

    @property
    def kv_block_tokens(self) -> int:
        """Tokens of a block of the prefix cache; 1 while no engine has reported its limits."""
        return 1 if self.engine_info.cached is None else self.engine_info.cached.kv_block_tokens

    @property
    def health(self) -> Health:
        """The health of the replicas."""
        return self.replica_set.health

    @property
    def placed(self) -> Mapping[tuple[str, str], int]:
        """Requests granted, by kind of affinity key and by how their replica was found."""
        return self._retries.placed

    def status(self, request_id: str) -> QueueStatus | None:
        """A request's queue position; None: it does not wait in the queue."""
        return self.queue.status(request_id)

    async def info(self) -> EngineInfo | None:
        """The limits of the model's engines; None while no engine has reported them."""
        return (
            await self.engine_info.fetch_info()
            if self.engine_info.cached is None and self.ready
            else self.engine_info.cached
        )

    async def load(self, replica_id: str) -> EngineLoad | None:
        """The live load of one engine; None if it does not answer in time."""
        return await self.engine_info.fetch_load(replica_id)

    def view(self) -> QueueView:
        """Counts of this router's part of the queue."""
        return self.queue.view()

    async def serve(
        self,
        arrival: Arrival,
        make: MakeSubmit,
        relay: Relay,
        key: AffinityKey | None = None,
        trace: RequestTrace | None = None,
    ) -> None:
        """Wait for a grant, submit the request, and pass the stream with its first frames to `relay`.

        If the replica is lost before its first frame, the request waits again, up to `max_wait_s` in all. Raises as
        `Retries.run_queued`.
        """
        trace = RequestTrace() if trace is None else trace
        with self._count_active():
            trace.ahead = self.queue.ahead(arrival.request_class)
            await self._retries.run_queued(arrival, key, make, relay, self._admission.max_wait_s, trace)

    async def serve_unqueued(self, make: MakeSubmit, relay: Relay, trace: RequestTrace | None = None) -> None:
        """As `serve` for work that takes no slot (tokenizing): at once on any replica, or on the first one to start."""
        trace = RequestTrace() if trace is None else trace
        with self._count_active():
            await self._retries.run_unqueued(make, relay, self._admission.max_wait_s, self._next_replica, trace)

    async def acquire(self, arrival: Arrival) -> RequestGrant:
        """See `Retries.acquire`."""
        return await self._retries.acquire(arrival)

    def _any_replica(self) -> str:
        replica_id = self.replica_set.next_replica()
        if replica_id is None:
            start_s = self.queue.expected_start_s()
            raise Unavailable(f"no replica of {self.settings.name} is running", retry_after_s=start_s)
        return replica_id

    async def _next_replica(self) -> str:
        """Any replica; while none runs, the first one to start."""
        await self.cold_start.wait_for_replica(self._admission.no_replica_wait_s, self._admission.max_queued)
        self._check_open()
        return self._any_replica()

    def _update_cold_start(self) -> None:
        self.cold_start.update(scales_from_zero=not self.settings.replicas.min_replicas, running=self.ready)

    def _replicas_changed(self, names: frozenset[str]) -> None:
        new = names - self.replica_set.running
        self.replica_set.set_running(names)
        self._update_cold_start()
        self._warn_slow_start()
        if new:
            self.engine_info.refresh()

    def _warn_slow_start(self) -> None:
        """Log a warning, once per start, if requests are refused before a replica can start."""
        start_s = self.queue.last_start_s
        if start_s is None or start_s == self._reported_start_s:
            return
        self._reported_start_s = start_s
        held_s = min(self._admission.no_replica_wait_s, self._admission.max_wait_s)
        if start_s > held_s:
            logger.warning(
                "%s: a replica started %.0f s after the first request for one; requests are refused after %.0f s. Set "
                "admission.no_replica_wait_s and max_wait_s above the first figure, or min_replicas to 1",
                self.settings.name,
                start_s,
                held_s,
            )
