"""How plots are written: the same figures give the same file, and its text stays text."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


def save(figure: Figure, file: Path) -> None:
    """Write a plot; its format is the file's suffix."""
    with matplotlib.rc_context({"svg.hashsalt": "serve_app", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
