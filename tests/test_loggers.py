"""A test finds the loggers as a process has them at first, whatever ran in its process before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from ray._private.ray_logging import setup_logger
from ray.serve._private.logging_utils import configure_default_serve_logger

from serve_app.system.events import keep_events
from serve_app.system.log_format import SERVE_LOGGER
from tests.conftest import reset_loggers


def ray_begun_at_error(_folder: Path) -> None:
    setup_logger(logging.ERROR, "")


def serve_begun(_folder: Path) -> None:
    configure_default_serve_logger()


def events_kept(folder: Path) -> None:
    assert keep_events(folder, "another test") is not None


def level_set(_folder: Path) -> None:
    logging.getLogger(SERVE_LOGGER).setLevel(logging.CRITICAL)


def all_disabled(_folder: Path) -> None:
    logging.disable(logging.CRITICAL)


@pytest.mark.parametrize("left", [ray_begun_at_error, serve_begun, events_kept, level_set, all_disabled])
def test_a_test_sees_warnings_whatever_another_has_left(
    left: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger(SERVE_LOGGER)
    before = [*logger.handlers]
    try:
        left(tmp_path)
        reset_loggers()
        logger.warning("Seen")
        assert [one.getMessage() for one in caplog.records] == ["Seen"]
        assert list(tmp_path.iterdir()) == []
    finally:
        logger.handlers = before
        reset_loggers()
