"""What Serve's controller has asked the ledger about engine starts, and been told: a book between two threads.

The controller's loop writes down which replicas it is about to start and reads where they belong; it never waits. A
thread (`autoscaling.placement_hook`) carries the asks to the quota actor and writes the answers down.

Rules
- A start waits for its answer, for `START_WAIT_S` without a word at most; then Ray places it as it would without us.
- Where Ray has room nowhere, a start waits a moment, since what has just ended is still counted; then its bundle is
  Ray's to keep, which is what the cluster autoscaler sees.
- What is not said again is forgotten: by this book after `SILENT_S`, by the ledger after a berth's time.

Invariant: no method waits for anything but the other thread's few lines under the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autoscaling.policies import Room
from serve_app.core.memory import Start, StartsAsk, StartsReply

START_WAIT_S = 10.0  # the actor answers in milliseconds; the first look at a cluster's nodes takes it seconds
RAY_FULL_WAIT_S = 3.0  # Serve's view of what is free lags its replicas' ends by a second or two
SILENT_S = 10.0  # the controller's loop ticks ten times a second: silent for so long, the application is gone
FRESH_S = 5.0  # answers come every second; older than that they say nothing of what is free now
BUNDLE_WAIT_S = 30.0  # a bundle tied to a node that has not got it by then is given up: the node is gone, or was taken


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with a start: `wait`, or place it on `node`; None: where Ray likes."""

    wait: bool
    node: str | None = None


WAIT = Verdict(wait=True)
ANYWHERE = Verdict(wait=False)
NO_ANSWER = Room(0, "the ledger has not said whether there is memory")


@dataclass(slots=True)
class _Start:
    nodes: tuple[str, ...]
    since: float
    heard_at: float
    verdict: Verdict | None = None
    placed_at: float | None = None
    judged: bool = False


@dataclass(slots=True)
class _Model:
    name: str
    asked_bytes: int | None
    starts: dict[str, _Start] = field(default_factory=dict)
    more: int = 0
    nodes: tuple[str, ...] = ()
    target: int = 0
    asked_target: int = 0
    room: Room | None = None  # as answered, with the target that was asked with
    room_target: int = 0
    known: bool = True
    heard_at: float = float("-inf")


class StartBook:
    """One application's starts.

    Args:
        models: by deployment, a model's name and the bytes it asks for where its settings say.
    """

    def __init__(self, models: Mapping[str, tuple[str, int | None]]) -> None:
        self._models = {deployment: _Model(*model) for deployment, model in models.items()}
        self._lock = threading.Lock()
        self._ticked_at = float("-inf")

    def manages(self, deployment: str, gpus: float) -> bool:
        """Whether the ledger is to choose for this deployment's replicas, each of which asks Ray for so many GPUs: a
        share of one, or none at all and a stated amount of memory. A whole one only Ray can give."""
        model = self._models.get(deployment)
        return model is not None and (0 < gpus < 1 or (not gpus and model.asked_bytes is not None))

    # The controller's loop

    def where(self, deployment: str, replica: str, nodes: Sequence[str], now: float) -> Verdict:
        """Where a replica belongs that is about to start; `nodes`: where Ray has room for it."""
        with self._lock:
            start = self._models[deployment].starts.setdefault(replica, _Start(tuple(nodes), now, now))
            start.nodes = tuple(nodes)
            if start.verdict is not None and start.verdict.node is not None and start.verdict.node not in nodes:
                start.verdict = None  # Ray has given the rest of that node to another; the ledger says where else
            if start.verdict is None and not nodes and now - start.since > RAY_FULL_WAIT_S:
                start.verdict = ANYWHERE
            if start.verdict is None and now - start.heard_at > START_WAIT_S:
                start.verdict = ANYWHERE
            return start.verdict or WAIT

    def placed(self, deployment: str, replica: str, now: float) -> None:
        """Ray has it; what the ledger keeps for it is to be kept until it has come, or is gone."""
        with self._lock:
            model = self._models[deployment]
            if replica in model.starts:
                model.starts[replica].placed_at = now
            model.more = max(0, model.more - 1)  # it was one of them

    def tick(self, starting: Collection[str], now: float) -> None:
        """The controller's loop goes on, and these replicas are starting."""
        with self._lock:
            self._ticked_at = now
            for model in self._models.values():
                model.starts = {replica: start for replica, start in model.starts.items() if replica in starting}

    def room(self, deployment: str, target: int, more: int, nodes: Sequence[str], now: float) -> Room | None:
        """For how many replicas beyond the target there is memory, of so many more; None: that is not the ledger's to
        say. What was kept for one counts no more when the target has risen by it."""
        with self._lock:
            model = self._models[deployment]
            model.target, model.more, model.nodes = target, more, tuple(nodes)
            if not more or not nodes:
                return None  # where Ray has no room its pending bundle asks the cluster autoscaler for a node
            if any(start.verdict is None for start in model.starts.values()):
                return NO_ANSWER
            if model.room is None or model.room_target != target or now - model.heard_at > FRESH_S:
                return NO_ANSWER
            if not model.known:
                return None
            return Room(model.room.held, model.room.why or NO_ANSWER.why)  # it may have been asked for fewer

    # The thread

    def anything(self, now: float) -> bool:
        """Whether there is something to ask: not when the controller has nothing to start, or is silent."""
        with self._lock:
            if now - self._ticked_at > SILENT_S:
                for model in self._models.values():
                    model.starts, model.more = {}, 0
            return any(_ask(model) is not None for model in self._models.values())

    def asks(self, now: float) -> dict[str, StartsAsk]:
        """What to ask, by deployment; its answer counts for the targets of this moment."""
        if not self.anything(now):
            return {}
        with self._lock:
            for model in self._models.values():
                model.asked_target = model.target
            return {deployment: ask for deployment, model in self._models.items() if (ask := _ask(model))}

    def answered(self, asks: Mapping[str, StartsAsk], replies: Sequence[StartsReply], now: float) -> None:
        """The quota actor's answers, in the order of the asks."""
        with self._lock:
            for (deployment, ask), reply in zip(asks.items(), replies, strict=True):
                model = self._models[deployment]
                for asked in ask.starts:
                    if asked.replica in model.starts:
                        model.starts[asked.replica].heard_at = now
                for place in reply.places:
                    start = model.starts.get(place.replica)
                    if start is not None and start.verdict is None:
                        start.verdict = Verdict(wait=False, node=place.node)
                if ask.more:
                    model.room_target = model.asked_target
                    model.room, model.known, model.heard_at = Room(reply.held, reply.why), reply.known, now

    def overdue(self, now: float) -> list[str]:
        """Replicas tied to a node whose bundles may not have come for too long. Each is told once."""
        found = []
        with self._lock:
            for model in self._models.values():
                for replica, start in model.starts.items():
                    tied = start.verdict is not None and start.verdict.node is not None and not start.judged
                    if tied and start.placed_at is not None and now - start.placed_at > BUNDLE_WAIT_S:
                        start.judged = True
                        found.append(replica)
        return found


def _ask(model: _Model) -> StartsAsk | None:
    starts = tuple(
        Start(replica, start.nodes, start.placed_at is not None)
        for replica, start in model.starts.items()
        if start.nodes or start.placed_at is not None
    )
    if not starts and not model.more:
        return None
    return StartsAsk(model.name, starts, model.more, model.nodes, model.asked_bytes)
