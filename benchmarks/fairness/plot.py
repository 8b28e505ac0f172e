"""Accumulated service of each client over time, one panel an arm.

Invariant: the panels have one scale, so that what differs between them is the service alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common.figure import save
from benchmarks.fairness.metric import Answer, accumulated, clients_of

POINTS = 121  # a point every five seconds of ten minutes: finer than the eye sees here
COLOURS = ("#d95f02", "#1b6ca8", "#1b9e77", "#7570b3", "#666666")
PANEL_INCHES = (4.2, 3.3)


def plot(arms: Mapping[str, Sequence[Answer]], begin_s: float, end_s: float, title: str, file: Path) -> None:
    """Write the plot; every arm has the same clients.

    Raises:
        ValueError: no arm, or nobody was served.
    """
    moments = np.linspace(begin_s, end_s, POINTS)
    service = {name: accumulated(answers, moments) for name, answers in arms.items()}
    if not any(each.any() for each in service.values()):
        raise ValueError("there is nothing to draw")
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(arms), height), layout="constrained")
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(1, len(arms), sharey=True, squeeze=False)[0]
    for panel, (name, answers) in zip(panels, arms.items(), strict=True):
        panel.set_prop_cycle(color=COLOURS)
        clients = clients_of(answers)
        for client, row in zip(clients, service[name], strict=True):
            panel.plot(moments, row / 1000, label=client)
        panel.set_title(name)
        panel.set_xlabel("seconds")
        panel.grid(True, alpha=0.3)
        if len(clients) <= len(COLOURS):
            panel.legend(fontsize=8)
    panels[0].set_ylabel("service, thousands of tokens")
    panels[0].set_ylim(bottom=0)
    save(figure, file)
