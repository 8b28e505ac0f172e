"""What is simulated: frozen values, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoscaling.simulator.profiles import GB, EngineProfile
from autoscaling.simulator.serve_delays import ServeDelays
from serve_app.core.limits import Limits
from serve_app.core.queue import QueuePolicy
from serve_app.errors import ConfigError
from serve_app.types import RequestClass

QUEUE_POLICY = QueuePolicy(max_queued=1000, max_wait_s=60.0)
DELAYS = ServeDelays()


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """How many replicas a model has; the defaults are those of `serve_app.settings`.

    Args:
        initial_replicas: that run when the simulation begins; None: `min_replicas`.
        target_ongoing, look_back_s: see `autoscaling.policies.Signals`.
        metrics_interval_s: between the numbers that routers and engines report to Serve.
        control_s: between the decisions of Serve's controller.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    initial_replicas: int | None = None
    target_ongoing: float = 20.0
    look_back_s: float = 5.0
    metrics_interval_s: float = 1.0
    control_s: float = 0.25
    delays: ServeDelays = DELAYS

    def __post_init__(self) -> None:
        first = self.min_replicas if self.initial_replicas is None else self.initial_replicas
        if not 0 <= self.min_replicas <= first <= self.max_replicas:
            bounds = f"{self.min_replicas} to {self.max_replicas} replicas, {first} at first"
            raise ConfigError(f"scaling: {bounds}", param="min_replicas")

    @property
    def first_replicas(self) -> int:
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model. `drain_s`: how long a replica that is to end may finish its requests."""

    name: str
    profile: EngineProfile
    queue: QueuePolicy = QUEUE_POLICY
    scaling: ScalingPlan = ScalingPlan()
    drain_s: float = 600.0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The nodes of the cluster, all of one kind.

    Args:
        gpus: of a node.
        gpu_bytes: of each.
        least, most: nodes: those that are always there, and how many there may be.
        start_s: from the demand for a further node until it takes replicas.
        idle_s: for so long a further node without a replica is kept.
    """

    gpus: int = 8
    gpu_bytes: int = 80 * GB
    least: int = 1
    most: int = 1
    start_s: float = 180.0
    idle_s: float = 300.0

    def __post_init__(self) -> None:
        if self.gpus < 1 or not 0 <= self.least <= self.most:
            raise ConfigError(f"nodes: {self.least} to {self.most} with {self.gpus} GPUs", param="nodes")


@dataclass(frozen=True, slots=True)
class ClassPlan:
    """What requests of a class are promised, and what their clients do. None: no level, no end to their patience, no
    deadline.

    Args:
        ttft_slo_s: within which the first token comes.
        patience_s: without a first token a client leaves after this.
        deadline_s: after which a grant is of no use.
    """

    ttft_slo_s: float | None = None
    patience_s: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaDeath:
    """The oldest running replica of a model dies, with its requests; none runs: nothing happens."""

    at_s: float
    model: str


@dataclass(frozen=True, slots=True)
class RouterSilence:
    """A router reports no numbers to Serve for a while; its requests go on."""

    at_s: float
    for_s: float
    router: int = 0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A batch that is submitted at a moment. `rows`: prompt and output tokens of each."""

    batch_id: str
    at_s: float
    tenant: str
    model: str
    rows: Sequence[tuple[int, int]]


Fault = ReplicaDeath | RouterSilence


@dataclass(frozen=True, slots=True)
class World:
    """A cluster and its clients.

    Args:
        classes: a class that is not here has no level, and its clients stay.
        limits: of tenants; others have none.
        routers: among which requests are spread in turn.
        delay_s: of a message between router and quota actor, one way.
        turn_s: see `RouterLink`.
        request_s: that a request and its first token take on their way, beside queue and engine: HTTP, reading the
            body, Serve. An unloaded request shows it.
        progress_s: between the counts of produced tokens that a router gets of each request; production has them with
            each frame, and tells the actor of each request about twice a second.
        preempts: whether a running request may be stopped for one of a higher class.
        max_gpus: of all replicas together, as policies keep it; None: no bound.
        seed: of everything that is drawn.
    """

    models: tuple[ModelPlan, ...]
    nodes: NodePlan = NodePlan()
    classes: Mapping[RequestClass, ClassPlan] = field(default_factory=dict)
    limits: Mapping[str, Limits] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    batches: tuple[BatchPlan, ...] = ()
    routers: int = 3
    delay_s: float = 0.0005
    turn_s: float = 0.005
    request_s: float = 0.0
    progress_s: float = 10.0
    preempts: bool = True
    max_gpus: float | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"models: {names}; name each of them once", param="models")
        for model in self.models:
            profile = model.profile
            if profile.gpus > self.nodes.gpus or profile.memory_bytes > self.nodes.gpu_bytes:
                raise ConfigError(f"no node has room for a replica of {model.name}", param="nodes")
        known = set(names)
        for fault in self.faults:
            if isinstance(fault, ReplicaDeath) and fault.model not in known:
                raise ConfigError(f"faults: there is no model {fault.model!r}", param="faults")
            if isinstance(fault, RouterSilence) and not 0 <= fault.router < self.routers:
                raise ConfigError(f"faults: there is no router {fault.router}", param="faults")
        for batch in self.batches:
            if batch.model not in known:
                raise ConfigError(f"batches: there is no model {batch.model!r}", param="batches")
        if self.routers < 1:
            raise ConfigError(f"routers is {self.routers}", param="routers")

    def model(self, name: str) -> ModelPlan:
        """The plan of a model. Raises ConfigError."""
        found = next((model for model in self.models if model.name == name), None)
        if found is None:
            raise ConfigError(f"a request asks for the model {name!r}, which is not simulated", param="model")
        return found
