"""Makes Serve's controller start engine replicas where the ledger reserves memory for them: the only module that
changes Serve's scheduler (private; read in Ray 2.60.0).

Serve's loop passes each replica to start to `DeploymentScheduler._schedule_replica`; if that returns False, the replica
stays pending and is passed again at the next tick, 0.1 s later. So a start waits there, without blocking the loop, for
the quota actor's answer, and is then bound to its node: by a label selector on its bundles (`ray.io/node-id`), or by
node affinity if it has no bundles.

Invariant: after any failure here, Serve schedules as without this hook; the controller's loop never waits.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from ray.util import placement_group_table

from autoscaling.policies import ScaleUpLimit
from autoscaling.start_book import ANYWHERE, StartBook
from autoscaling.unplaced import controllers_deployments, end_replica
from serve_app.core.memory import StartsReply, StartsRequest
from serve_app.core.times import START_ANSWER_S, START_ASK_S, START_RENEW_S
from serve_app.quota import QuotaActor
from serve_app.settings import QuotaSettings

logger = logging.getLogger("ray.serve")

NODE_LABEL = "ray.io/node-id"  # Ray puts it on every node
BOOKS = "serve_app_start_books"  # on the scheduler: by application
PARAMETERS = ("scheduling_request", "default_scheduling_strategy", "target_node_id", "target_labels")
STRICT_PACK = "STRICT_PACK"  # Ray's strategy of a placement group on one node
FREE_S = 1.0  # that a count of free resources is used for `room`: it costs a look at every replica
ROUNDING = 1e-6  # of shares of a GPU
NOT_PLACED = ("PENDING", "RESCHEDULING")  # Ray's states of a placement group: never placed, or its node has died


def placer_of_this_process(application: str, models: Mapping[str, Any], quota: Mapping[str, Any]) -> StartPlacer:
    """The start placer of an application, in the process of Serve's controller.

    Args:
        models: by engine deployment, the model's name and its bytes or None; see `serve_app.settings.serve_config`.
        quota: the settings of the quota actor, in case it must be started.
    """
    known = {deployment: (str(name), asked) for deployment, (name, asked) in models.items()}
    actor = cache(partial(QuotaActor, QuotaSettings.model_validate(quota)))  # the first call, in a thread, starts it
    placing = StartPlacer(application, known, lambda asks: actor().starts(asks, START_ANSWER_S))
    placing.tick()  # Serve starts the first replicas before it calls the policy
    return placing


def controllers_scheduler() -> Any:
    """Serve's scheduler if this process is the controller; None: it is not, or not ready."""
    return getattr(controllers_deployments(), "_deployment_scheduler", None)


def give_up_bundles(replica: str) -> None:
    """End a replica whose bundles Ray has not placed: Serve counts its start as failed, frees the bundles and starts
    another replica. (If only its bundles were freed, it would wait for them for ever: observed.)"""
    for entry in placement_group_table().values():
        if entry["name"].endswith(f"#{replica}") and entry["state"] in NOT_PLACED:
            logger.warning("Replica %s found no free capacity on its node or lost it; Serve starts another", replica)
            end_replica(entry["name"])


class StartPlacer:
    """Exchanges one application's starts between the controller and the ledger.

    Args:
        application: its name.
        models: by engine deployment, the model's name and the bytes in its settings, or None.
        ask: calls the quota actor and waits for its answer, in a separate thread; raises any error of the call.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        application: str,
        models: Mapping[str, tuple[str, int | None]],
        ask: Callable[[tuple[StartsRequest, ...]], tuple[StartsReply, ...]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application = application
        self._book = StartBook(models)
        self._ask = ask
        self._clock = clock
        self._scheduler: Any = None
        self._failed = self._actor_away = self._room_failed = False
        self._free: Mapping[str, Any] = {}  # resources by node, as Serve last counted them for `room`
        self._free_until = float("-inf")
        self._thread: threading.Thread | None = None

    def tick(self) -> None:
        """Called once in every tick of the controller's loop."""
        if self._failed:
            return
        try:
            self._scheduler = self._scheduler or controllers_scheduler()
            if self._scheduler is None:
                return  # the controller is still being built
            install_hook(self._scheduler, self._application, self)
            self._book.tick(starting_replicas(self._scheduler, self._application), self._clock())
            self._ensure_thread()
        except Exception:
            self._failed = True
            name = self._application
            logger.exception(
                "Serve has an unknown scheduler; Ray alone places %s. Install a supported version of Ray", name
            )

    def scale_up_limit(self, deployment_id: Any, target: int, more: int) -> ScaleUpLimit | None:
        """The number of `more` replicas beyond the target that have reserved memory; None: Ray decides that.

        Raises the errors of a scheduler of Serve that is not as expected."""
        if self._scheduler is None or self._failed:
            return None
        info = self._scheduler._deployments.get(deployment_id)
        if info is None or not self._book.manages(deployment_id.name, info.required_resources):
            return None
        nodes = nodes_with_capacity(self._scheduler, info.required_resources) if more else []
        return self._book.scale_up_limit(deployment_id.name, target, more, nodes, self._clock())

    def room(self, deployment_id: Any, target: int) -> int | None:
        """Further replicas for which there is a place now, in the GPU memory that the ledger has answered about and in
        Ray's free resources, without further nodes; None: not known. It asks nobody and reserves nothing."""
        if self._scheduler is None or self._failed or self._room_failed:
            return None
        try:
            info = self._scheduler._deployments.get(deployment_id)
            places = None if info is None else self._places(info)
            if not places or info is None or not self._book.manages(deployment_id.name, info.required_resources):
                return places
            return self._book.known_room(deployment_id.name, target, self._clock())
        except Exception:
            self._room_failed = True
            logger.exception("Serve has an unknown scheduler; what is free is not shown. Install a supported version")
            return None

    def _places(self, info: Any) -> int | None:
        """How many replicas fit into Ray's free resources; None: Ray alone knows."""
        bundles = info.placement_group_bundles or ()
        if len(bundles) > 1 and info.placement_group_strategy != STRICT_PACK:
            return None  # over several nodes
        now = self._clock()
        if now >= self._free_until:
            self._free = self._scheduler._get_available_resources_per_node()
            self._free_until = now + FREE_S
        return places(self._free, info.required_resources)

    def node_for(self, request: Any) -> str | None:
        """The node where Serve's scheduler must start a replica; ANYWHERE: Ray chooses; None: it waits."""
        name = request.replica_id.deployment_id.name
        if self._failed or request.gang_placement_group is not None or request.target_node_id is not None:
            return ANYWHERE
        if not self._book.manages(name, request.requested_resources):
            return ANYWHERE
        nodes = nodes_with_capacity(self._scheduler, request.requested_resources)
        found = self._book.node_for(name, request.replica_id.unique_id, nodes, self._clock())
        self._ensure_thread()
        return found

    def record_placed(self, request: Any) -> None:
        """Record that Serve's scheduler has started the replica."""
        name = request.replica_id.deployment_id.name
        if self._book.manages(name, request.requested_resources):
            self._book.record_placed(name, request.replica_id.unique_id, self._clock())

    def _ensure_thread(self) -> None:
        """Run a thread that calls the actor while there are requests; the thread ends by itself."""
        if (self._thread is None or not self._thread.is_alive()) and self._book.requests(self._clock()):
            self._thread = threading.Thread(target=self._run, name="engine starts", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while asks := self._book.requests(self._clock()):
            try:
                self._book.record_replies(asks, self._ask(tuple(asks.values())), self._clock())
                self._actor_away = False
                for replica in self._book.overdue(self._clock()):
                    give_up_bundles(replica)
            except Exception as error:  # noqa: BLE001 - after any error the next turn asks again
                if not self._actor_away:
                    name = self._application
                    logger.warning("Quota actor does not place the engine starts of %s, which wait: %s", name, error)
                self._actor_away = True
            waits = any(not start.placed for ask in asks.values() for start in ask.starts)
            time.sleep(START_ASK_S if waits else START_RENEW_S)  # in the separate thread


def install_hook(scheduler: Any, application: str, placing: StartPlacer) -> None:
    """Hook `placing` into Serve's scheduler for the starts of an application; a later call replaces it.

    Raises:
        TypeError, AttributeError: the scheduler is not as expected; it is unchanged.
    """
    books = getattr(scheduler, BOOKS, None)
    if books is None:
        found = tuple(inspect.signature(scheduler._schedule_replica).parameters)
        if found != PARAMETERS:
            raise TypeError(f"_schedule_replica takes {', '.join(found)}")
        books = {}
        scheduler._schedule_replica = _with_placement(scheduler._schedule_replica, books)
        setattr(scheduler, BOOKS, books)
    books[application] = placing


def _with_placement(original: Callable[..., bool], books: Mapping[str, StartPlacer]) -> Callable[..., bool]:
    """Serve's method, called once the start placer has decided."""

    def schedule(
        scheduling_request: Any, default_scheduling_strategy: str, target_node_id: Any = None, target_labels: Any = None
    ) -> bool:
        placing = books.get(scheduling_request.replica_id.deployment_id.app_name)
        node: str | None = ANYWHERE
        try:
            if placing is not None:
                node = placing.node_for(scheduling_request)
        except Exception:
            logger.exception("Replica %s is placed by Ray alone. Report this traceback", scheduling_request.replica_id)
        if node is None:
            return False
        with bound_to_node(scheduling_request, node):
            target = node or target_node_id  # Serve counts resources not yet seen as taken by it
            done = original(scheduling_request, default_scheduling_strategy, target, target_labels)
        if done and placing is not None:
            with contextlib.suppress(Exception):
                placing.record_placed(scheduling_request)
        return done

    return schedule


@contextlib.contextmanager
def bound_to_node(request: Any, node: str) -> Any:
    """The request bound to this node within the context; ANYWHERE: unchanged. Serve reuses a request that failed."""
    if node == ANYWHERE:
        yield
        return
    bundles = request.placement_group_bundles
    selector = request.placement_group_bundle_label_selector
    try:
        if bundles is None:
            request.target_node_id = node
        else:
            request.placement_group_bundle_label_selector = [
                {**had, NODE_LABEL: node} for had in (selector or [{}] * len(bundles))
            ]
        yield
    finally:
        request.placement_group_bundle_label_selector = selector
        if bundles is None:
            request.target_node_id = None


def starting_replicas(scheduler: Any, application: str) -> set[str]:
    """The pending and starting replicas of an application."""
    return {
        replica.unique_id
        for several in (scheduler._pending_replicas, scheduler._launching_replicas)
        for deployment, replicas in several.items()
        if deployment.app_name == application
        for replica in replicas
    }


def nodes_with_capacity(scheduler: Any, required: Any) -> list[str]:
    """The nodes where Ray has the required resources free."""
    available = scheduler._get_available_resources_per_node()
    return [node for node, room in available.items() if room.can_fit(required)]


def places(available: Mapping[str, Any], required: Any) -> int | None:
    """How many replicas with these resources fit into what the nodes have free; None: they need none."""
    needed = {name: amount for name, amount in required.items() if amount}
    if not needed:
        return None
    return sum(
        max(0, min(int((room.get(name) or 0.0) / amount + ROUNDING) for name, amount in needed.items()))
        for room in available.values()
    )
