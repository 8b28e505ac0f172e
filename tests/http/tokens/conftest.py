"""A busy machine may take longer for a reading than a request waits; only the tests of that bound are about it."""

from __future__ import annotations

import pytest

from serve_app.http.tokens import follower
from tests.waiting import patient

READING_S = 30.0  # a thread, a connection over loopback, and the certificates of all authorities


@pytest.fixture(autouse=True)
def _patient_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "WAIT_S", patient(READING_S))
