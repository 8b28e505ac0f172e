"""What Serve's controller hands an application-level policy, made from real `AutoscalingContext` objects."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ray.serve import autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from autoscaling.policies import Signals
from autoscaling.ray_policy import ScalingPolicy
from serve_app.names import BLOCKED_PREFIX, GRANTED_PREFIX, ONGOING, ROUTER, ROWS_PREFIX, WAITING_PREFIX, deployment_of

MODEL = "org/m"
ENGINE = deployment_of(MODEL)
SKEW_S = 86_400.0  # replicas' clocks are a day off: only their progress may count


@dataclass(frozen=True)
class Point:
    """A sample, as Serve's `TimeStampedValue`."""

    timestamp: float
    value: Any


@dataclass
class FakeServe:
    """One model behind some routers, and the clock of the controller. Numbers are told by `tell`."""

    now: float = 1000.0
    target: int = 1
    engines: tuple[str, ...] = ("e1",)
    routers: tuple[str, ...] = ("r1",)
    queued: float = 0.0
    served_total: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, dict[str, dict[str, list[Point]]]] = field(default_factory=lambda: {ROUTER: {}, ENGINE: {}})

    def clock(self) -> float:
        return self.now

    def tell(self, deployment: str, replica: str, **numbers: Any) -> None:
        """A replica's report, as it comes at its interval."""
        for name, value in numbers.items():
            series = self.seen[deployment].setdefault(name, {}).setdefault(replica, [])
            series.append(Point(self.now + SKEW_S, value))

    def router_tells(self, router: str, waiting: Any, granted: Any, model: str = MODEL) -> None:
        self.tell(ROUTER, router, **{f"{WAITING_PREFIX}{model}": waiting, f"{GRANTED_PREFIX}{model}": granted})

    def router_tells_rows(self, router: str, rows: Any, model: str = MODEL) -> None:
        self.tell(ROUTER, router, **{f"{ROWS_PREFIX}{model}": rows})

    def router_tells_blocked(self, router: str, blocked: Any, model: str = MODEL) -> None:
        self.tell(ROUTER, router, **{f"{BLOCKED_PREFIX}{model}": blocked})

    def engine_tells(self, engine: str, ongoing: Any) -> None:
        self.tell(ENGINE, engine, **{ONGOING: ongoing})

    def contexts(self, states: Any = None) -> dict[Any, AutoscalingContext]:
        """By deployment id; here the name stands for it."""
        scale = {"min_replicas": 0, "max_replicas": 8, "target_ongoing_requests": 10, "look_back_period_s": 5.0}
        config = AutoscalingConfig(**(scale | {"metrics_interval_s": 1.0} | self.config))
        routers = AutoscalingConfig(min_replicas=3, max_replicas=3, metrics_interval_s=1.0, look_back_period_s=5.0)
        return {
            name: self._context(name, config_of, running, target, states or {})
            for name, config_of, running, target in (
                (ENGINE, config, self.engines, self.target),
                (ROUTER, routers, self.routers, len(self.routers)),
            )
        }

    def _context(
        self, name: str, config: Any, running: tuple[str, ...], target: int, states: Any
    ) -> AutoscalingContext:
        # Serve hands on the series of replicas that run, and of no others
        raw = {
            number: {replica: list(points) for replica, points in series.items() if replica in running}
            for number, series in self.seen[name].items()
        }
        return AutoscalingContext(
            deployment_id=name,  # type: ignore[arg-type]
            deployment_name=name,
            app_name="serve_app",
            current_num_replicas=len(running),
            target_num_replicas=target,
            running_replicas=list(running),  # type: ignore[arg-type]
            total_num_requests=lambda: self.served_total,
            total_queued_requests=lambda: self.queued,
            aggregated_metrics=None,
            raw_metrics=lambda: raw,  # type: ignore[arg-type,return-value]
            capacity_adjusted_min_replicas=config.min_replicas,
            capacity_adjusted_max_replicas=config.max_replicas,
            policy_state=dict(states.get(name, {})),
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now,
            config=config,
        )


GARBAGE = [None, "many", float("nan"), float("inf"), -1, True, [], {}]


class Controller:
    """Ticks a policy as Serve does, through Serve's own wrapper, and applies what comes out."""

    def __init__(self, serve: FakeServe, **parts: Any) -> None:
        self.serve = serve
        self.policy = ScalingPolicy(clock=serve.clock, **parts)
        self._wrapped = autoscaling_policy._apply_app_level_autoscaling_config(self.policy)
        self._states: Any = {}
        self.reasons: list[str] = []

    def tick(self, seconds: float = 0.1) -> int | None:
        """One tick; returns the engine deployment's new target, None without a decision."""
        self.serve.now += seconds
        contexts = self.serve.contexts(self._states)
        decisions, self._states = self._wrapped(contexts)
        assert ROUTER not in decisions
        self.reasons.append(self._states.get(ENGINE, {}).get("reason", ""))
        if ENGINE in decisions:
            self.serve.target = decisions[ENGINE]
        return decisions.get(ENGINE)


def quick(**more: Any) -> FakeServe:
    """Without Serve's delays: what the policy asks for is done at once."""
    serve = FakeServe(config={"upscale_delay_s": 0.0, "downscale_delay_s": 0.0})
    for name, value in more.items():
        setattr(serve, name, value)
    return serve


IDLE = Signals(
    running=1,
    target=1,
    waiting=0.0,
    granted=0.0,
    executing=0.0,
    complete=True,
    cold_start_requested=False,
    min_replicas=0,
    max_replicas=8,
    target_ongoing=10.0,
    look_back_s=5.0,
    now=0.0,
)


def signals(**changes: Any) -> Signals:
    return replace(IDLE, **changes)
