"""Engine starts that Serve's controller asked the ledger about, with the answers: shared between two threads.

The controller's loop records the replicas it is about to start and reads their nodes; it never waits. A thread
(`autoscaling.placement_hook`) sends the requests to the quota actor and records the answers.

Rules
- A start waits for its answer, at most `START_WAIT_S`; then Ray places it as without the ledger.
- If no node has free capacity in Ray, a start waits `RAY_FULL_WAIT_S`, since Ray still counts ended replicas; then it
  becomes a pending bundle in Ray, which the cluster autoscaler sees.
- A start that is not repeated expires: in this book after `CONTROLLER_SILENT_S`, in the ledger after
  `RESERVATION_TTL_S`.

Invariant: no method waits, except for the lock, which the other thread holds for a few lines.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autoscaling.policies import ScaleUpLimit
from serve_app.core.memory import Start, StartsReply, StartsRequest
from serve_app.core.times import CONTROLLER_SILENT_S, START_FRESH_S, START_WAIT_S

RAY_FULL_WAIT_S = 3.0  # Serve's view of free resources lags its replicas' ends by a second or two
BUNDLE_WAIT_S = 30.0  # after this an unplaced bundle bound to a node is given up: the node is gone or full


ANYWHERE = ""  # instead of a node: Ray chooses
NO_ANSWER = ScaleUpLimit(0, "the ledger has not reported whether there is memory")


@dataclass(slots=True)
class _Start:
    nodes: tuple[str, ...]
    waits_since: float
    answered_at: float
    node: str | None = None  # ANYWHERE: Ray chooses; None: not decided, the start waits
    placed_at: float | None = None
    is_reported: bool = False


@dataclass(slots=True)
class _Model:
    name: str
    requested_bytes: int | None
    starts: dict[str, _Start] = field(default_factory=dict)
    more: int = 0
    nodes: tuple[str, ...] = ()
    target: int = 0
    requested_target: int = 0
    reply: StartsReply = field(default_factory=StartsReply)  # the last one about `more`, with the target of its request
    reply_target: int = 0
    replied_at: float = float("-inf")


class StartBook:
    """One application's starts.

    Args:
        models: by deployment, a model's name and the bytes in its settings, or None.
    """

    def __init__(self, models: Mapping[str, tuple[str, int | None]]) -> None:
        self._models = {deployment: _Model(*model) for deployment, model in models.items()}
        self._lock = threading.Lock()
        self._ticked_at = float("-inf")

    def manages(self, deployment: str, resources: Mapping[str, float]) -> bool:
        """Whether the ledger places this deployment's replicas; `resources`: of each, in Ray. It does for a share of a
        GPU, or for no GPU and a stated amount of memory. Only Ray can place whole GPUs."""
        model = self._models.get(deployment)
        gpus = resources.get("GPU", 0.0)
        return model is not None and (0 < gpus < 1 or (not gpus and model.requested_bytes is not None))

    # The controller's loop

    def node_for(self, deployment: str, replica: str, nodes: Sequence[str], now: float) -> str | None:
        """The node of a replica about to start; ANYWHERE: Ray chooses; None: it waits. `nodes`: those with free
        resources in Ray."""
        with self._lock:
            start = self._models[deployment].starts.setdefault(replica, _Start(tuple(nodes), now, now))
            start.nodes = tuple(nodes)
            if start.node and start.node not in nodes:
                start.node = None  # that node's resources in Ray are taken; the ledger chooses another
            ray_full = not nodes and now - start.waits_since > RAY_FULL_WAIT_S
            if start.node is None and (ray_full or now - start.answered_at > START_WAIT_S):
                start.node = ANYWHERE
            return start.node

    def record_placed(self, deployment: str, replica: str, now: float) -> None:
        """Record that Ray places the replica; the ledger keeps its reservation until it has started or ended."""
        with self._lock:
            model = self._models[deployment]
            if replica in model.starts:
                model.starts[replica].placed_at = now
            model.more = max(0, model.more - 1)  # the started replica was one of these

    def tick(self, starting: Collection[str], now: float) -> None:
        """Record a tick of the controller's loop; `starting`: the starting replicas."""
        with self._lock:
            self._ticked_at = now
            for model in self._models.values():
                model.starts = {replica: start for replica, start in model.starts.items() if replica in starting}

    def scale_up_limit(
        self, deployment: str, target: int, more: int, nodes: Sequence[str], now: float
    ) -> ScaleUpLimit | None:
        """The number of `more` replicas beyond the target that have memory; None: the ledger does not decide that. A
        reservation no longer counts once the target has risen by it."""
        with self._lock:
            model = self._models[deployment]
            model.target = target
            model.more = more
            model.nodes = tuple(nodes)
            if not more or not nodes:
                return None  # a bundle pending in Ray makes the cluster autoscaler add a node
            waits = any(start.node is None for start in model.starts.values())
            if waits or model.reply_target != target or now - model.replied_at > START_FRESH_S:
                return NO_ANSWER
            if not model.reply.need_known:
                return None
            # the request may have been for fewer
            return ScaleUpLimit(model.reply.reserved_replicas, model.reply.why or NO_ANSWER.reason)

    def known_room(self, deployment: str, target: int, now: float) -> int | None:
        """The further replicas for which the ledger has memory, as it last answered about this target; None: it was not
        asked lately, or had enough for all that were wanted. This asks nothing."""
        with self._lock:
            model = self._models[deployment]
            reply = model.reply
            fresh = model.reply_target == target and now - model.replied_at <= START_FRESH_S
            return reply.reserved_replicas if fresh and reply.need_known and reply.why else None

    # The thread

    def requests(self, now: float) -> dict[str, StartsRequest]:
        """The requests, by deployment; their answers hold for the present targets. There are none if the controller has
        no starts, or no longer ticks."""
        with self._lock:
            if now - self._ticked_at > CONTROLLER_SILENT_S:
                for model in self._models.values():
                    model.starts = {}
                    model.more = 0
            for model in self._models.values():
                model.requested_target = model.target
            return {deployment: ask for deployment, model in self._models.items() if (ask := _request_for(model))}

    def record_replies(self, requests: Mapping[str, StartsRequest], replies: Sequence[StartsReply], now: float) -> None:
        """Record the quota actor's answers, in the order of the requests."""
        with self._lock:
            for (deployment, ask), reply in zip(requests.items(), replies, strict=True):
                model = self._models[deployment]
                for asked in ask.starts:
                    if asked.replica in model.starts:
                        model.starts[asked.replica].answered_at = now
                for replica, node in reply.placements.items():
                    start = model.starts.get(replica)
                    if start is not None and start.node is None:
                        start.node = node or ANYWHERE
                if ask.more:
                    model.reply = reply
                    model.reply_target = model.requested_target
                    model.replied_at = now

    def overdue(self, now: float) -> list[str]:
        """Replicas bound to a node whose bundles may be unplaced for too long. Each is returned once."""
        found = []
        with self._lock:
            for replica, start in [pair for model in self._models.values() for pair in model.starts.items()]:
                late = start.placed_at is not None and now - start.placed_at > BUNDLE_WAIT_S
                if late and start.node and not start.is_reported:
                    start.is_reported = True
                    found.append(replica)
        return found


def _request_for(model: _Model) -> StartsRequest | None:
    starts = tuple(
        Start(replica, start.nodes, start.placed_at is not None)
        for replica, start in model.starts.items()
        if start.nodes or start.placed_at is not None
    )
    if not starts and not model.more:
        return None
    return StartsRequest(model.name, starts, model.more, model.nodes, model.requested_bytes)
