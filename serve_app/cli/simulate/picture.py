"""The picture of a comparison, for those who have matplotlib: it is an extra, and its import takes a second."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from serve_app.cli.simulate.figures import Comparison
from serve_app.errors import BadRequest

OPTION = "--plot"
EXTRA = "plots"


def require_pictures() -> None:
    """Raises BadRequest: matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadRequest(
            f"{OPTION} needs matplotlib: install serve-app[{EXTRA}]; --html draws without it", param=OPTION
        )


def write_picture(found: Comparison, file: Path) -> None:
    """Write the picture; its format is the file's suffix. Raises BadRequest: it cannot be written."""
    from serve_app.cli.simulate.plot import draw

    try:
        draw(found, file)
    except (OSError, ValueError) as error:
        raise BadRequest(f"{OPTION} {file}: {getattr(error, 'strerror', None) or error}", param=OPTION) from None
