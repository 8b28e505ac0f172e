"""A line with engines that are numbers: each token takes a step of a clock that is a number, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Admission, Arrival, Grant, QueuePolicy, Refuse
from serve_app.types import RequestClass

NEVER_S = 1e9


def patient(max_queued: int = 10**6, **more: object) -> QueuePolicy:
    """Nobody is refused for waiting."""
    return QueuePolicy(max_queued, NEVER_S, NEVER_S, **more)  # type: ignore[arg-type]


@dataclass
class Run:
    arrival: Arrival
    left: int  # steps


@dataclass
class Shop:
    """Requests run for as many steps as they have output tokens; `backlog` brings what a step begins with."""

    queue: Admission
    step_s: float = 0.05
    now: float = 0.0
    running: dict[str, Run] = field(default_factory=dict)
    waits: dict[str, Arrival] = field(default_factory=dict)
    waited_s: dict[str, float] = field(default_factory=dict)
    order: list[Arrival] = field(default_factory=list)  # as granted
    ends: dict[str, list[str]] = field(default_factory=dict)
    service: dict[str, float] = field(default_factory=dict)  # weighted tokens by tenant, as they are produced
    made: int = 0

    def arrive(self, tenant: str, cls: RequestClass = RequestClass.NORMAL, prompt: int = 10, output: int = 10) -> str:
        self.made += 1
        arrival = Arrival(f"{tenant}.{self.made}", cls, tenant, 1, prompt + output, prompt_tokens=prompt)
        self.waits[arrival.request_id] = arrival
        self.took(self.queue.on_arrive(arrival, self.now))
        return arrival.request_id

    def took(self, actions: list) -> None:  # type: ignore[type-arg]
        for action in actions:
            arrival = self.waits.pop(action.request_id)
            kind = "granted" if isinstance(action, Grant) else action.reason.value
            self.ends.setdefault(action.request_id, []).append(kind)
            if isinstance(action, Refuse):
                continue
            self.waited_s[action.request_id] = action.waited_s
            self.order.append(arrival)
            self.running[action.request_id] = Run(arrival, arrival.cost - arrival.prompt_tokens)
            self.service[arrival.tenant] = self.service.get(arrival.tenant, 0.0) + arrival.prompt_tokens

    def step(self, refill: Callable[[], None] | None = None) -> None:
        """Every running request makes one token."""
        self.now += self.step_s
        for request_id, run in list(self.running.items()):
            run.left -= 1
            self.service[run.arrival.tenant] += 2.0
            self.took(self.queue.on_progress(request_id, 1, self.now))
            if run.left <= 0:
                del self.running[request_id]
                output = run.arrival.cost - run.arrival.prompt_tokens
                self.took(self.queue.on_done(request_id, self.now, run.arrival.prompt_tokens, output))
        if refill is not None:
            refill()

    def keep_waiting(self, tenant: str, make: Callable[[], object], count: int = 3) -> None:
        """Let a tenant always have so many waiting."""
        while sum(arrival.tenant == tenant for arrival in self.waits.values()) < count:
            make()

    def slots(self, tenant: str) -> int:
        return sum(run.arrival.tenant == tenant for run in self.running.values())


def make_shop(
    policy: QueuePolicy | None = None, slots: int = 8, kv_tokens: int | None = None, step_s: float = 0.05
) -> Shop:
    queue = Admission(policy or patient())
    set_replica(queue, "a", slots, 0.0, kv_tokens)
    return Shop(queue, step_s)
