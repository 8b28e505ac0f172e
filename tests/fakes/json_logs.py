"""What the processes of Serve log, as JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.system.log_format import JsonFormatter


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Filled with a line for each record while a test runs."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter({}))
    logger = logging.getLogger("ray.serve")
    logger.addHandler(handler)
    yield out
    logger.removeHandler(handler)


def failures(written: io.StringIO) -> list[dict[str, Any]]:
    """The records of the level ERROR."""
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    return [line for line in lines if line["level"] == "ERROR"]
