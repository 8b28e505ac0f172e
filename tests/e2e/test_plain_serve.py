"""`serve run` without the fast path's environment works too, slower."""

from __future__ import annotations

import pytest

from tests.e2e.alone import run_alone
from tests.requires import requires

pytestmark = pytest.mark.long  # a cluster of its own


def test_the_application_answers_on_an_ordinary_serve() -> None:
    requires("linux")
    assert run_alone("tests.e2e.plain_serve") == {
        "without a key": 401,
        "chat": 200,
        "done": True,
        "running": 1.0,
        "after leaving": 0.0,
        "from zero": 200,
    }
