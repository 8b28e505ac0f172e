"""The Python handle needs neither the fast path nor an instance of ours: an ordinary Ray and Serve will do."""

from __future__ import annotations

import pytest

from tests.e2e.alone import run_alone
from tests.requires import requires


@pytest.mark.long
def test_the_handle_works_on_an_ordinary_serve() -> None:
    requires("linux")
    assert run_alone("tests.e2e.plain_handle") == {
        "client": [True, True],
        "plain": True,
        "another deployment": [True, True, True],
        "errors": [[True, 404, "model_not_found"], [True, 404, "model_not_found"]],
        "after leaving": 0.0,
    }
