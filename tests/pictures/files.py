"""Which picture is in which file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.pictures import admission, batching, memory, scaling

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURES: dict[Path, Callable[[], str]] = {
    IMAGES / f"{module.NAME}.svg": module.picture for module in (admission, memory, scaling, batching)
}
