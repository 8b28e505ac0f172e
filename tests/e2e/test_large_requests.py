"""Large requests against a real engine that others use: its event loop goes on, and what fits is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.attacks import found
from tests.e2e.large_attack import ATTACKS, FITS, TRIVIALS

pytestmark = pytest.mark.long  # an engine and an attack of minutes; tests/engine has the bounds themselves

# CPU of one turn of the loop: 3 ms where the helper reads them, half a second and more where the loop does.
LONGEST_TURN_MS = 50.0


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return found()["large"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FITS)
def test_what_fits_is_answered(seen: dict[str, Any], name: str) -> None:
    answer = seen["fits"][name]
    assert answer["status"] == 200, answer
    if name in ("chat", "responses"):
        usage = json.loads(answer["answer"])["usage"]
        counted = json.loads(seen["fits"]["tokenize" if name == "chat" else "input_tokens"]["answer"])
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        assert prompt == counted.get("count", counted.get("input_tokens")) > 600


@pytest.mark.parametrize("name", ATTACKS)
def test_no_turn_of_the_event_loop_is_long_under_large_requests(seen: dict[str, Any], name: str) -> None:
    under = seen["under"][name]
    assert under["trivial"] == [200] * TRIVIALS
    assert all(status in (200, 400) for status in under["attack"]), under
    assert under["longest_turn_ms"] < LONGEST_TURN_MS, under
