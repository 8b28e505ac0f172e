"""Draws the example of `docs/explanation/batching.md`: the same requests in batches and without, by `core.batching`."""

from __future__ import annotations

from serve_app.core.batching import Batcher, BatchItem, BatchPolicy, RequestBatch
from tests.drawing import framed, text
from tests.pictures.slots import LEFT, PALE_TEXT, RIGHT, ROW, WIDTH, Colour, Stretch, axis, chart

NAME = "batching"

SLOTS = 4
STEPS = {
    "A": 2, "B": 9, "C": 3, "D": 4, "E": 2, "F": 3, "G": 8, "H": 3, "I": 6, "J": 2, "K": 4, "L": 3,
}  # fmt: skip
SPAN = 24
COLOURS = {"request": Colour("#bfdbfe", "#1d4ed8", "a request")}
POLICIES = {
    "static: a batch of four, the next one when its longest answer has ended": BatchPolicy(SLOTS),
    "continuous: a request takes a slot as soon as one is free": BatchPolicy(SLOTS, is_continuous=True),
}


def play(policy: BatchPolicy) -> list[Stretch]:
    """All requests come at once; each runs for its number of steps."""
    batcher = Batcher(policy)
    stretches: list[Stretch] = []
    running: dict[str, Stretch] = {}

    def begin(batches: list[RequestBatch], now: int) -> None:
        for batch in batches:
            for item in batch.items:
                used = {stretch.slot for stretch in running.values()}
                slot = min(slot for slot in range(SLOTS) if slot not in used)
                running[item.item_id] = Stretch(item.item_id, "request", slot, now, now + STEPS[item.item_id])
                stretches.append(running[item.item_id])

    for name, steps in STEPS.items():
        begin(batcher.on_arrive(BatchItem(name, 1, steps), 0.0), 0)
    now = 0
    while running:
        now += 1
        for name in [name for name, stretch in running.items() if stretch.ends_s == now]:
            del running[name]
            begin(batcher.on_end(name, now), now)
    return stretches


def figures(stretches: list[Stretch]) -> tuple[int, float]:
    """The steps until all have ended, and the part of the slots that was used meanwhile."""
    steps = max(int(stretch.ends_s or 0) for stretch in stretches)
    return steps, sum(STEPS.values()) / (steps * SLOTS)


def picture() -> str:
    """The SVG text."""
    parts: list[str] = []
    top = 36.0
    for title, policy in POLICIES.items():
        stretches = play(policy)
        steps, used = figures(stretches)
        bottom = top + ROW * SLOTS + 4
        parts.append(text(16, top - 14, title, "start", "#0f172a", weight="bold", size=13))
        parts.append(
            text(WIDTH - RIGHT, top - 14, f"{steps} steps, {used:.0%} of the slots", "end", "#0f172a", size=13)
        )
        parts += axis(top - 4, bottom, SPAN, range(0, SPAN + 1, 2), "")
        parts += chart(top, SLOTS, SPAN, stretches, COLOURS)
        top = bottom + 54
    parts.append(text(LEFT, top - 24, "steps of the engine; each letter is a request", "start", PALE_TEXT, size=12))
    return framed(top - 10, parts, WIDTH)
