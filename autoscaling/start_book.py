"""Engine starts that Serve's controller asked the ledger about, with the answers: shared between two threads.

The controller's loop records the replicas it is about to start and reads their nodes; it never waits. A thread
(`autoscaling.placement_hook`) sends the requests to the quota actor and records the answers.

Rules
- A start waits for its answer, at most `START_WAIT_S`; then Ray places it as without the ledger.
- If no node has free capacity in Ray, a start waits `RAY_FULL_WAIT_S`, since Ray still counts ended replicas; then it
  becomes a pending bundle in Ray, which the cluster autoscaler sees.
- A start that is not repeated expires: in this book after `SILENT_S`, in the ledger after a reservation's time.

Invariant: no method waits, except for the lock, which the other thread holds for a few lines.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autoscaling.policies import ScaleUpLimit
from serve_app.core.memory import Start, StartsReply, StartsRequest

START_WAIT_S = 10.0  # the actor answers in milliseconds; its first listing of a cluster's nodes takes seconds
RAY_FULL_WAIT_S = 3.0  # Serve's view of free resources lags its replicas' ends by a second or two
SILENT_S = 10.0  # the controller's loop ticks ten times a second: without a tick for this long, the application is gone
FRESH_S = 5.0  # answers come every second; an older one does not describe the present free memory
BUNDLE_WAIT_S = 30.0  # after this an unplaced bundle bound to a node is given up: the node is gone or full


@dataclass(frozen=True, slots=True)
class StartVerdict:
    """The decision on a start: `wait`, or place it on `node`; None: Ray chooses the node."""

    wait: bool
    node: str | None = None


WAIT = StartVerdict(wait=True)
ANYWHERE = StartVerdict(wait=False)
NO_ANSWER = ScaleUpLimit(0, "the ledger has not reported whether there is memory")


@dataclass(slots=True)
class _Start:
    nodes: tuple[str, ...]
    waits_since: float
    answered_at: float
    verdict: StartVerdict | None = None
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
    limit: ScaleUpLimit | None = None  # the answer, with the target of its request
    limit_target: int = 0
    need_known: bool = True
    answered_at: float = float("-inf")


class StartBook:
    """One application's starts.

    Args:
        models: by deployment, a model's name and the bytes in its settings, or None.
    """

    def __init__(self, models: Mapping[str, tuple[str, int | None]]) -> None:
        self._models = {deployment: _Model(*model) for deployment, model in models.items()}
        self._lock = threading.Lock()
        self._ticked_at = float("-inf")

    def manages(self, deployment: str, gpus: float) -> bool:
        """Whether the ledger places this deployment's replicas; `gpus`: requested from Ray by each replica. It does for
        a share of a GPU, or for no GPU and a stated amount of memory. Only Ray can place whole GPUs."""
        model = self._models.get(deployment)
        return model is not None and (0 < gpus < 1 or (not gpus and model.requested_bytes is not None))

    # The controller's loop

    def verdict_for(self, deployment: str, replica: str, nodes: Sequence[str], now: float) -> StartVerdict:
        """The verdict for a replica about to start; `nodes`: those with free resources in Ray."""
        with self._lock:
            start = self._models[deployment].starts.setdefault(replica, _Start(tuple(nodes), now, now))
            start.nodes = tuple(nodes)
            if start.verdict is not None and start.verdict.node is not None and start.verdict.node not in nodes:
                start.verdict = None  # that node's resources in Ray are taken; the ledger chooses another
            if start.verdict is None and not nodes and now - start.waits_since > RAY_FULL_WAIT_S:
                start.verdict = ANYWHERE
            if start.verdict is None and now - start.answered_at > START_WAIT_S:
                start.verdict = ANYWHERE
            return start.verdict or WAIT

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
            model.target, model.more, model.nodes = target, more, tuple(nodes)
            if not more or not nodes:
                return None  # a bundle pending in Ray makes the cluster autoscaler add a node
            if any(start.verdict is None for start in model.starts.values()):
                return NO_ANSWER
            if model.limit is None or model.limit_target != target or now - model.answered_at > FRESH_S:
                return NO_ANSWER
            if not model.need_known:
                return None
            # the request may have been for fewer
            return ScaleUpLimit(model.limit.replicas, model.limit.reason or NO_ANSWER.reason)

    # The thread

    def has_requests(self, now: float) -> bool:
        """Whether there are requests to send: not if the controller has no starts, or no longer ticks."""
        with self._lock:
            if now - self._ticked_at > SILENT_S:
                for model in self._models.values():
                    model.starts, model.more = {}, 0
            return any(_request_for(model) is not None for model in self._models.values())

    def requests(self, now: float) -> dict[str, StartsRequest]:
        """The requests, by deployment; their answers hold for the present targets."""
        if not self.has_requests(now):
            return {}
        with self._lock:
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
                    if start is not None and start.verdict is None:
                        start.verdict = StartVerdict(wait=False, node=node)
                if ask.more:
                    model.limit_target = model.requested_target
                    model.limit, model.need_known, model.answered_at = (
                        ScaleUpLimit(reply.reserved_replicas, reply.why),
                        reply.need_known,
                        now,
                    )

    def overdue(self, now: float) -> list[str]:
        """Replicas bound to a node whose bundles may be unplaced for too long. Each is returned once."""
        found = []
        with self._lock:
            for model in self._models.values():
                for replica, start in model.starts.items():
                    tied = start.verdict is not None and start.verdict.node is not None and not start.is_reported
                    if tied and start.placed_at is not None and now - start.placed_at > BUNDLE_WAIT_S:
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
