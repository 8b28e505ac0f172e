"""Grammars that cost much, against a real engine that others use."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.settings.model import DEFAULT_GRAMMAR_CPU_S
from tests.e2e.attacks import found
from tests.e2e.grammar_attack import ATTACKS, IDLE_CPU_S, STAYS_S

pytestmark = pytest.mark.long  # an attack of minutes; tests/engine has the bounds themselves

# It waits for one compile of the other tenant, 0.85 s of CPU, and its own: 5 s on two cores that eight others use. What
# bounds nothing makes it wait for half an hour.
LATER_S = 15.0
# The attack is there for 3 s and one compile runs at a time, each on one core; decoding and looking at 8 MB of it, four
# hundred beats and the trivial request are the rest.
ATTACK_CPU_S = STAYS_S + DEFAULT_GRAMMAR_CPU_S + 4.0


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return found()["grammars"]  # type: ignore[no-any-return]


def error(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["status"] == 400, answer
    return json.loads(answer["answer"])["error"]  # type: ignore[no-any-return]


def test_another_tenant_s_schema_is_answered_promptly(seen: dict[str, Any]) -> None:
    assert seen["alone"]["status"] == seen["under"]["status"] == 200
    assert seen["under"]["seconds"] < seen["alone"]["seconds"] + LATER_S


def test_what_the_attack_costs_is_bounded_and_ends_with_it(seen: dict[str, Any]) -> None:
    assert len(ATTACKS) > 8
    assert seen["attack_cpu_s"] < ATTACK_CPU_S
    assert seen["after_cpu_s"] < IDLE_CPU_S


@pytest.mark.parametrize("which", ["refused", "refused_stream", "refused_size"])
def test_too_complex_a_grammar_is_refused_by_name(seen: dict[str, Any], which: str) -> None:
    reported = error(seen[which])

    assert (reported["code"], reported["param"]) == ("grammar_too_complex", "structured_outputs.choice")


def test_an_answer_whose_masks_cost_too_much_ends(seen: dict[str, Any]) -> None:
    assert error(seen["ambiguous"])["code"] == "grammar_too_complex"
