"""Engine replicas that end their process: in tests they only note the status."""

from __future__ import annotations

import pytest

from serve_app.engine import deployment


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit statuses of engine replicas that ended their process; here they must not, it is the tests'."""
    statuses: list[int] = []
    monkeypatch.setattr(deployment, "end_process", statuses.append)
    return statuses
