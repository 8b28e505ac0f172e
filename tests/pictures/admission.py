"""Draws who runs when in the example of `docs/explanation/admission.md`: played by `core.queue.Admission`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Action, Admission, Arrival, Grant, Preempt, QueuePolicy
from serve_app.types import RequestClass
from tests.drawing import framed, text
from tests.pictures.slots import LEFT, PALE_TEXT, ROW, WIDTH, Colour, Stretch, at_x, axis, chart, legend

NAME = "admission"

SLOTS = 4
TOKENS_PER_S = 20  # of each answer
PROMPT = 100
SPAN_S = 30.0
STEPS_PER_S = 10
STEP_S = 1 / STEPS_PER_S


@dataclass(frozen=True, slots=True)
class Request:
    name: str
    tenant: str
    level: RequestClass
    at_s: float
    seconds: int  # that its answer takes


LOW, NORMAL, HIGH, _ = RequestClass
REQUESTS = (
    *(Request(f"N{n}", "night", LOW, 0.0, 12) for n in (1, 2, 3)),
    *(Request(f"R{n}", "research", NORMAL, 2.0 + (n - 1) * STEP_S, 8) for n in range(1, 7)),
    *(Request(f"S{n}", "support", NORMAL, 4.0 + (n - 1) * STEP_S, 8) for n in (1, 2)),
    Request("H1", "oncall", HIGH, 6.0, 4),
)
COLOURS = {
    "oncall": Colour("#fecaca", "#b91c1c", "oncall, high"),
    "support": Colour("#bfdbfe", "#1d4ed8", "support, normal"),
    "research": Colour("#fde68a", "#b45309", "research, normal"),
    "night": Colour("#e2e8f0", "#64748b", "night, low"),
}


@dataclass
class Play:
    """One engine that makes a token of each running request in a step; its queue decides who runs."""

    queue: Admission = field(default_factory=lambda: Admission(QueuePolicy(100, 600.0)))
    stretches: list[Stretch] = field(default_factory=list)
    running: dict[str, Stretch] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    arrivals: dict[str, Arrival] = field(default_factory=dict)

    def run(self) -> list[Stretch]:
        set_replica(self.queue, "engine", SLOTS, 0.0)
        waiting = sorted(REQUESTS, key=lambda request: request.at_s)
        seconds = {request.name: request.seconds for request in REQUESTS}
        for step in range(int(SPAN_S * STEPS_PER_S) + 1):
            now = step / STEPS_PER_S
            for name in list(self.running):
                made = TOKENS_PER_S // STEPS_PER_S
                self.made[name] += made
                self.apply(self.queue.on_progress(name, made, now), now)
                if name in self.running and self.made[name] >= seconds[name] * TOKENS_PER_S:
                    self.end(name, now)
            while waiting and waiting[0].at_s <= now:
                self.arrive(waiting.pop(0), now)
            self.apply(self.queue.on_tick(now), now)
        return self.stretches

    def arrive(self, request: Request, now: float) -> None:
        output = request.seconds * TOKENS_PER_S
        arrival = Arrival(
            request.name,
            request.level,
            request.tenant,
            cost_tokens=PROMPT + output,
            prompt_tokens=PROMPT,
            preemptible=True,
        )
        self.made[request.name] = 0
        self.arrivals[request.name] = arrival
        self.apply(self.queue.on_arrive(arrival, now), now)

    def end(self, name: str, now: float, *, is_stopped: bool = False) -> None:
        stretch = self.running.pop(name)
        stretch.ends_s = now
        stretch.is_stopped = is_stopped
        output = self.made[name] - self.arrivals[name].produced_tokens
        self.apply(self.queue.on_done(name, now, PROMPT, output), now)

    def apply(self, actions: list[Action], now: float) -> None:
        for action in actions:
            name = action.request_id
            if isinstance(action, Grant):
                used = {stretch.slot for stretch in self.running.values()}
                slot = min(slot for slot in range(SLOTS) if slot not in used)
                stretch = Stretch(name, self.arrivals[name].tenant, slot, now)
                self.running[name] = stretch
                self.stretches.append(stretch)
            elif isinstance(action, Preempt):
                self.stop(name, now, keeps_age=action.keeps_place)
            else:
                raise ValueError(f"the example refuses {name}")

    def stop(self, name: str, now: float, *, keeps_age: bool) -> None:
        """A request stops, and arrives again with what it has produced."""
        arrival = self.arrivals[name]
        age_s = now - next(request.at_s for request in REQUESTS if request.name == name) if keeps_age else 0.0
        self.arrivals[name] = replace(
            arrival, accepted=True, age_s=age_s, preempted=arrival.preempted + 1, produced_tokens=self.made[name]
        )
        self.end(name, now, is_stopped=True)
        self.apply(self.queue.on_arrive(self.arrivals[name], now), now)


def picture() -> str:
    """The SVG text."""
    top = 62
    bottom = top + ROW * SLOTS + 4
    parts = [
        text(16, 20, "Four slots of one engine: who runs when", "start", "#0f172a", weight="bold", size=14),
        *legend(42, COLOURS),
        *axis(top - 4, bottom, SPAN_S, range(0, int(SPAN_S) + 1, 2)),
        *chart(top, SLOTS, SPAN_S, Play().run(), COLOURS),
    ]
    arrivals: dict[float, list[str]] = {}
    for request in REQUESTS:
        arrivals.setdefault(float(int(request.at_s)), []).append(request.name)
    parts.append(text(LEFT - 34, bottom + 34, "arrive", "end", "#0f172a", size=12))
    for seconds, names in arrivals.items():
        label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        parts.append(text(at_x(seconds, SPAN_S), bottom + 34, label, "middle", "#0f172a", size=11))
    note = "A bar with a dashed edge was stopped; the request continues later with what it has produced."
    parts.append(text(LEFT, bottom + 56, note, "start", PALE_TEXT, size=12))
    return framed(bottom + 70, parts, WIDTH)
