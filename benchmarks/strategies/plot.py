"""Which slot is busy with which request over time: static batches above, continuous batching below.

Invariant: both panels have one time scale, so that the idle area is what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.common.figure import save
from benchmarks.strategies.figures import slots_of
from benchmarks.strategies.orders import Row

COLOURS = ("#1b6ca8", "#d95f02", "#1b9e77", "#7570b3", "#b8860b")
PANEL_INCHES = (9.0, 2.6)
SPAN_S = 2.0  # drawn of a run: several static batches of the built-in model, and few enough bars to see


def plot(panels: Mapping[str, tuple[Sequence[Row], float]], slots: int, file: Path, span_s: float = SPAN_S) -> None:
    """Write the plot; a panel has the rows of a run and the use of its slots.

    Raises:
        ValueError: a run has no answer.
    """
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width, height * len(panels)), layout="constrained")
    figure.suptitle(f"{slots} slots of one engine, the same requests in the same order; white: idle", fontsize=10)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, (rows, use)) in zip(axes, panels.items(), strict=True):
        placed = slots_of(rows)
        if not placed:
            raise ValueError(f"{name}: there is nothing to draw")
        begin_s = min(row.first_s for _, row in placed)
        ended = sum(row.ended_s - begin_s <= span_s for _, row in placed)
        for slot, row in placed:
            left = row.first_s - begin_s
            right = min(row.ended_s - begin_s, span_s)
            if left < span_s:
                panel.barh(slot, right - left, left=left, height=0.85, color=COLOURS[row.number % len(COLOURS)])
        panel.set_title(f"{name}: {use:.0%} of the slots used, {ended} requests ended in {span_s:g} s", fontsize=10)
        panel.set_ylabel("slot")
        panel.set_ylim(-0.6, slots - 0.4)
        panel.set_xlim(0, span_s)
    axes[-1].set_xlabel("seconds")
    save(figure, file)
