"""Has Serve's controller start engine replicas where the ledger keeps memory for them: the only place that touches the
scheduler of Serve (private; read in Ray 2.60.0).

Serve's loop hands each replica that is to start to `DeploymentScheduler._schedule_replica`; one for which that returns
False stays in line and is handed over again with the next tick, 0.1 s later. So a start waits there, without holding
anything up, for the quota actor's answer, and is then tied to its node: by a label selector on its bundles
(`ray.io/node-id`), or by node affinity where it has none.

Invariant: whatever fails here, Serve schedules as it would without us; and the controller's loop waits for nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.util import placement_group_table

from autoscaling.policies import Room
from autoscaling.start_book import ANYWHERE, StartBook, Verdict
from serve_app.core.memory import StartsAsk, StartsReply
from serve_app.quota import QuotaActor
from serve_app.settings import QuotaSettings

logger = logging.getLogger("ray.serve")

NODE_LABEL = "ray.io/node-id"  # Ray puts it on every node
BOOKS = "serve_app_start_books"  # on the scheduler: by application
PARAMETERS = ("scheduling_request", "default_scheduling_strategy", "target_node_id", "target_labels")
NOT_PLACED = ("PENDING", "RESCHEDULING")  # Ray's states of a placement group: never was, or its node has died
ASK_S = 0.2  # between asks while a start waits for its answer
RENEW_S = 1.0  # between asks otherwise: a berth that nobody renews lasts ten times that
ANSWER_S = 5.0  # the actor answers in milliseconds

Ask = Callable[[tuple[StartsAsk, ...]], tuple[StartsReply, ...]]
"""Asks the quota actor and waits for its answer; raises whatever keeps it from answering."""


def of_this_process(application: str, models: Mapping[str, Any], quota: Mapping[str, Any]) -> Placing:
    """An application's starts, in the process of Serve's controller.

    Args:
        models: by engine deployment, the model's name and its bytes or None; see `serve_app.settings.serve_config`.
        quota: the settings of the quota actor, should it have to be started.
    """
    known = {deployment: (str(name), asked) for deployment, (name, asked) in models.items()}
    ledger = Ledger(QuotaSettings.model_validate(quota))
    placing = Placing(application, known, ledger, controllers_scheduler, give_up_bundles)
    placing.tick()  # Serve starts the first replicas before it asks the policy anything
    return placing


class Ledger:
    """Asks the quota actor; starts it where there is none."""

    def __init__(self, settings: QuotaSettings) -> None:
        self._settings = settings
        self._actor: QuotaActor | None = None

    def __call__(self, asks: tuple[StartsAsk, ...]) -> tuple[StartsReply, ...]:
        if self._actor is None:
            self._actor = QuotaActor(self._settings)
        return self._actor.starts(asks, ANSWER_S)


def controllers_scheduler() -> Any:
    """Serve's scheduler, of the controller that this process is; None: it is none, or not ready."""
    worker = ray._private.worker.global_worker
    controller = worker.actors.get(worker.actor_id)
    return getattr(getattr(controller, "deployment_state_manager", None), "_deployment_scheduler", None)


def give_up_bundles(replica: str) -> None:
    """End a replica whose bundles Ray has not placed: Serve takes its start for failed, frees the bundles and begins
    another. (Without its bundles alone it would wait for them for ever: seen.)"""
    for entry in placement_group_table().values():
        if entry["name"].endswith(f"#{replica}") and entry["state"] in NOT_PLACED:
            logger.warning("%s: its node has no room for it, or is gone; another is started", replica)
            ray.kill(ray.get_actor(entry["name"], namespace=SERVE_NAMESPACE))


class Placing:
    """One application's starts, from the controller to the ledger and back.

    Args:
        application: its name.
        models: by engine deployment, the model's name and the bytes it asks for where its settings say.
        ask: called from a thread of its own.
        find: Serve's scheduler in this process; None: there is none.
        release: gives up a replica's bundles that Ray has not placed.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        application: str,
        models: Mapping[str, tuple[str, int | None]],
        ask: Ask,
        find: Callable[[], Any],
        release: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application = application
        self._book = StartBook(models)
        self._ask, self._find, self._release, self._clock = ask, find, release, clock
        self._scheduler: Any = None
        self._failed = self._away = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def tick(self) -> None:
        """Once in every turn of the controller's loop."""
        if self._failed:
            return
        try:
            if self._scheduler is None:
                self._scheduler = self._find()
                if self._scheduler is None:
                    return  # the controller is still being built
            hook(self._scheduler, self._application, self)
            self._book.tick(_starting(self._scheduler, self._application), self._clock())
            self._wake()
        except Exception:
            self._failed = True
            logger.exception("Serve's scheduler is not as expected: Ray alone places engines")

    def room(self, deployment_id: Any, target: int, more: int) -> Room | None:
        """For how many beyond the target, of so many more replicas, memory is kept; None: Ray decides that.

        Raises what Serve's scheduler does when it is not as expected."""
        if self._scheduler is None or self._failed:
            return None
        info = self._scheduler._deployments.get(deployment_id)
        if info is None or not self._book.manages(deployment_id.name, _gpus(info.required_resources)):
            return None
        nodes = _with_room(self._scheduler, info.required_resources) if more else []
        return self._book.room(deployment_id.name, target, more, nodes, self._clock())

    def verdict(self, request: Any) -> Verdict:
        """Where Serve's scheduler is to start a replica."""
        name = request.replica_id.deployment_id.name
        if self._failed or request.gang_placement_group is not None or request.target_node_id is not None:
            return ANYWHERE
        if not self._book.manages(name, _gpus(request.requested_resources)):
            return ANYWHERE
        nodes = _with_room(self._scheduler, request.requested_resources)
        found = self._book.where(name, request.replica_id.unique_id, nodes, self._clock())
        self._wake()
        return found

    def placed(self, request: Any) -> None:
        """Serve's scheduler has started it."""
        name = request.replica_id.deployment_id.name
        if self._book.manages(name, _gpus(request.requested_resources)):
            self._book.placed(name, request.replica_id.unique_id, self._clock())

    def _wake(self) -> None:
        """Have a thread ask while there is something to ask; it ends by itself."""
        if self._thread is None and self._book.anything(self._clock()):
            with self._lock:
                self._thread = threading.Thread(target=self._run, name="engine starts", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            asks = self._book.asks(self._clock())
            if not asks:
                with self._lock:
                    self._thread = None
                return
            try:
                self._book.answered(asks, self._ask(tuple(asks.values())), self._clock())
                self._away = False
                for replica in self._book.overdue(self._clock()):
                    self._release(replica)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next turn asks again; starts do not wait long
                if not self._away:
                    logger.warning("the quota actor does not say where engines belong, and is asked again: %s", error)
                self._away = True
            waits = any(not start.placed for ask in asks.values() for start in ask.starts)
            time.sleep(ASK_S if waits else RENEW_S)  # in a thread of its own


def hook(scheduler: Any, application: str, placing: Placing) -> None:
    """Have a scheduler of Serve's ask us for the starts of an application; again: the newest one of it.

    Raises:
        TypeError, AttributeError: it is not as expected, and as it was.
    """
    books = getattr(scheduler, BOOKS, None)
    if books is None:
        found = tuple(inspect.signature(scheduler._schedule_replica).parameters)
        if found != PARAMETERS:
            raise TypeError(f"_schedule_replica takes {', '.join(found)}")
        books = {}
        scheduler._schedule_replica = _asking(scheduler._schedule_replica, books)
        setattr(scheduler, BOOKS, books)
    books[application] = placing


def _asking(original: Callable[..., bool], books: Mapping[str, Placing]) -> Callable[..., bool]:
    """Serve's method, with our question before it."""

    def schedule(
        scheduling_request: Any, default_scheduling_strategy: str, target_node_id: Any = None, target_labels: Any = None
    ) -> bool:
        placing = books.get(scheduling_request.replica_id.deployment_id.app_name)
        verdict = ANYWHERE
        try:
            if placing is not None:
                verdict = placing.verdict(scheduling_request)
        except Exception:
            logger.exception("%s is placed by Ray alone", scheduling_request.replica_id)
        if verdict.wait:
            return False
        with tied(scheduling_request, verdict.node):
            target = verdict.node or target_node_id  # by which Serve counts what it has not yet seen taken
            done = original(scheduling_request, default_scheduling_strategy, target, target_labels)
        if done and placing is not None:
            with contextlib.suppress(Exception):
                placing.placed(scheduling_request)
        return done

    return schedule


@contextlib.contextmanager
def tied(request: Any, node: str | None) -> Any:
    """The request as one for this node alone, for the block; None: as it is. Serve keeps a request that failed."""
    if node is None:
        yield
        return
    bundles, selector = request.placement_group_bundles, request.placement_group_bundle_label_selector
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


def _starting(scheduler: Any, application: str) -> set[str]:
    """The replicas of an application that wait to be started, or start."""
    return {
        replica.unique_id
        for several in (scheduler._pending_replicas, scheduler._launching_replicas)
        for deployment, replicas in several.items()
        if deployment.app_name == application
        for replica in replicas
    }


def _with_room(scheduler: Any, required: Any) -> list[str]:
    """The nodes where Ray has room for this."""
    available = scheduler._get_available_resources_per_node()
    return [node for node, room in available.items() if room.can_fit(required)]


def _gpus(resources: Mapping[str, float]) -> float:
    return float(resources.get("GPU", 0.0))
