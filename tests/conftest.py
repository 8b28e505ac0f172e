"""What all tests share: the marker of the long ones, and how a run ends."""

from __future__ import annotations

import os
import sys

import pytest

STATUS = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: too slow for `make test`; `make test-long` runs it")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End with the run's status, all fixtures torn down and all reported, without taking the interpreter apart.

    With Ray, gRPC and torch in one process that has crashed after the summary (segmentation fault, CI of 2026-11-20),
    and a crash there says nothing of what was tested.
    """
    status = config.stash.get(STATUS, None)
    if status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
