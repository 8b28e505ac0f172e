"""What all tests share: the marker of the long ones."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: too slow for `make test`; `make test-long` runs it")
