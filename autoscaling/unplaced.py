"""Starting replicas for which Ray has found no place, read in Serve's controller (private; read in Ray 2.60.0). For the
second or two that the process of a placed one needs, it counts as well: Serve does not know its node before.

Serve stops a replica by a call of its actor, and gives the actor `drain_s` to answer. An actor without a place never
answers: until then its bundles take the next free place, and Serve rolls out nothing of its deployment. A replica that
never had a place has no requests, so it is ended at once.

Serve also replaces no running replica of a deployment while one of its starting replicas has no place, so what is to be
replaced and what ends is counted, too.

Invariant: only replicas that were seen starting without a place, and none since, are ended.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.serve._private.common import ReplicaState
from ray.serve._private.constants import SERVE_NAMESPACE

logger = logging.getLogger("ray.serve")


def controllers_deployments() -> Any:
    """Serve's state of all deployments if this process is the controller; None: it is not, or not ready."""
    worker = ray._private.worker.global_worker
    controller = worker.actors.get(worker.actor_id)
    return getattr(controller, "deployment_state_manager", None)


def end_replica(actor: str) -> None:
    """End a replica's actor; no effect if it has ended. Serve then frees its bundles."""
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(actor, namespace=SERVE_NAMESPACE))


# Of a running replica; one that is given other settings goes on taking requests.
RUNNING = (ReplicaState.RUNNING, ReplicaState.UPDATING, ReplicaState.PENDING_MIGRATION)


@dataclass(slots=True)
class ReplicaCounts:
    """Of one deployment: replicas that start without a place, running ones that have to be replaced, ending ones; the
    ids of those that run and of those that start with a place, and how many Serve wants."""

    unplaced: int = 0
    outdated: int = 0
    stopping: int = 0
    running: frozenset[str] = frozenset()
    starting: frozenset[str] = frozenset()
    target: int = 0


NONE = ReplicaCounts()


class UnplacedReplicas:
    """The unplaced replicas of an application.

    Args:
        deployments: gives Serve's state of all deployments, see `controllers_deployments`.
        end: ends the actor of this name.
    """

    def __init__(
        self, deployments: Callable[[], Any] = controllers_deployments, end: Callable[[str], None] = end_replica
    ) -> None:
        self._deployments = deployments
        self._end = end
        self._seen: frozenset[str] = frozenset()  # actors that start, or are stopped, and never had a place
        self._failed = False

    def tick(self, applications: Collection[str | None]) -> Mapping[str, ReplicaCounts]:
        """Called once in every tick of the controller's loop: ends the replicas that Serve stops; returns the counts by
        deployment."""
        if self._failed:
            return {}
        try:
            return self._count(self._deployments(), applications)
        except (AttributeError, KeyError, TypeError):
            self._failed = True
            logger.exception(
                "Serve has unknown states; no start of %s counts as unplaced. Install a supported version of Ray",
                list(applications),
            )
        except Exception:
            logger.exception(
                "Serve has replicas of %s that could not be counted as unplaced. Report this traceback",
                list(applications),
            )
        return {}

    def _count(self, manager: Any, applications: Collection[str | None]) -> dict[str, ReplicaCounts]:
        seen = set()
        found = dict[str, ReplicaCounts]()
        for deployment, state in ({} if manager is None else manager._deployment_states).items():
            if deployment.app_name not in applications:
                continue
            replicas = state.list_replica_details()
            running = frozenset(one.replica_id for one in replicas if one.state in RUNNING)
            starting = frozenset(
                one.replica_id for one in replicas if one.state == ReplicaState.STARTING and one.node_id is not None
            )
            counts = ReplicaCounts(0, _outdated(state), 0, running, starting, state.target_num_replicas)
            found[deployment.name] = counts
            for replica in replicas:
                stops = replica.state == ReplicaState.STOPPING
                counts.stopping += stops
                if replica.node_id is not None:
                    continue
                if replica.state == ReplicaState.STARTING:
                    counts.unplaced += 1
                elif stops and replica.actor_name in self._seen:
                    self._end(replica.actor_name)
                else:
                    continue
                seen.add(replica.actor_name)
        self._seen = frozenset(seen)
        return found


def _outdated(state: Any) -> int:
    """The running replicas of a deployment that are not of its present version."""
    return int(state._replicas.count(exclude_version=state._target_state.version, states=[ReplicaState.RUNNING]))
