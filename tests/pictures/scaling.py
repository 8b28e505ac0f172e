"""Draws the example of `docs/explanation/scaling.md`: what `autoscaling.policies` wants, and what starts and ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoscaling.policies import OngoingRequestsPolicy, Signals
from tests.drawing import framed, text
from tests.pictures.slots import LEFT, PALE_TEXT, RIGHT, WIDTH, at_x, axis

NAME = "scaling"

LOAD = ((0, 15), (60, 87), (360, 12), (720, 12))  # since when, in seconds, and how many requests
TARGET_ONGOING = 20.0
UP_DELAY_S = 30
DOWN_DELAY_S = 120
LOOK_BACK_S = 5.0
START_S = 70  # of an engine
SPAN_S = 600
HEIGHT = 150  # of the chart
MOST = 6  # replicas on the axis


@dataclass
class Play:
    """One model, looked at every second. Serve makes a change once it was wanted for the delay of its direction."""

    policy: OngoingRequestsPolicy = field(default_factory=OngoingRequestsPolicy)
    wanted: list[int] = field(default_factory=list)  # by second
    running: list[int] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)

    def run(self) -> None:
        target = 1
        running = 1
        starts: list[int] = []  # when each starting replica runs
        differs_since: tuple[bool, int] | None = None  # whether more are wanted, and since when
        for now in range(SPAN_S + 1):
            load = next(count for since, count in reversed(LOAD) if since <= now)
            running += sum(at == now for at in starts)
            wanted = self.policy.decide(_signals(running, target, load, now)).replicas
            if wanted == target:
                differs_since = None
            elif differs_since is None or differs_since[0] != (wanted > target):
                differs_since = wanted > target, now
            if differs_since is not None and now - differs_since[1] >= (
                UP_DELAY_S if wanted > target else DOWN_DELAY_S
            ):
                starts += [now + START_S] * (wanted - target)
                running = min(running, wanted)
                target = wanted
                differs_since = None
            self.loads.append(load)
            self.wanted.append(wanted)
            self.running.append(running)


def _signals(running: int, target: int, load: int, now: int) -> Signals:
    return Signals(
        running=running,
        target=target,
        waiting=0.0,
        granted=load,
        executing=0.0,
        complete=True,
        cold_start_requested=False,
        min_replicas=1,
        max_replicas=8,
        target_ongoing=TARGET_ONGOING,
        look_back_s=LOOK_BACK_S,
        now=now,
    )


def picture() -> str:
    """The SVG text."""
    play = Play()
    play.run()
    top = 66
    bottom = top + HEIGHT
    parts = [text(16, 20, "Replicas of a model while its load changes", "start", "#0f172a", weight="bold", size=14)]
    names = (
        ("requests / 20", "#64748b", ""),
        ("replicas wanted", "#1d4ed8", "6 4"),
        ("replicas running", "#0f766e", ""),
    )
    for number, (name, colour, dashes) in enumerate(names):
        x = LEFT + 160 * number
        parts.append(_path(f"M{x} 41H{x + 26}", colour, dashes, 1.5 if name.startswith("requests") else 3))
        parts.append(text(x + 34, 45, name, "start", "#0f172a", size=12))
    for replicas in range(MOST + 1):
        y = _at_y(replicas, bottom)
        parts.append(f'<path d="M{LEFT} {y:.0f}H{WIDTH - RIGHT}" stroke="#e2e8f0"/>')
        parts.append(text(LEFT - 10, y + 4, str(replicas), "end", PALE_TEXT))
    parts += axis(top, bottom, SPAN_S, range(0, SPAN_S + 1, 60))
    parts.append(_path(_steps([load / TARGET_ONGOING for load in play.loads], bottom), "#64748b", "", 1.5))
    parts.append(_path(_steps(play.running, bottom), "#0f766e", "", 3))
    parts.append(_path(_steps(play.wanted, bottom), "#1d4ed8", "6 4", 2.5))
    notes = f"upscale_delay_s {UP_DELAY_S}, downscale_delay_s {DOWN_DELAY_S}; an engine's start takes {START_S} s here"
    parts.append(text(LEFT, bottom + 40, notes, "start", PALE_TEXT, size=12))
    return framed(bottom + 54, parts, WIDTH)


def _at_y(value: float, bottom: float) -> float:
    return bottom - value / MOST * HEIGHT


def _steps(values: list[float] | list[int], bottom: float) -> str:
    points = [f"M{at_x(0, SPAN_S):.1f} {_at_y(values[0], bottom):.1f}"]
    for at in range(1, len(values)):
        if values[at] != values[at - 1]:
            points.append(f"H{at_x(at, SPAN_S):.1f}V{_at_y(values[at], bottom):.1f}")
    return "".join([*points, f"H{at_x(SPAN_S, SPAN_S):.1f}"])


def _path(points: str, colour: str, dashes: str, width: float) -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="{points}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'
