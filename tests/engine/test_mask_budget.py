"""What a grammar's masks may cost, on a grammar whose clock the test holds."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.engine.vllm_adapter import mask_budget
from serve_app.engine.vllm_adapter.mask_budget import FIRST_S, TOKEN_S, bound_grammar


@pytest.fixture
def grammar(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose masks and tokens take what it says."""
    now = 0.0
    monkeypatch.setattr(mask_budget.time, "thread_time", lambda: now)

    class Grammar:
        mask_s = token_s = 0.0
        num_processed_tokens = 0

        def fill_bitmask(self, bitmask: Any, index: int) -> None:
            nonlocal now
            now += self.mask_s

        def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
            nonlocal now
            now += self.token_s
            self.num_processed_tokens += len(tokens)
            return True

    bound_grammar(Grammar)
    return Grammar()


def answer(grammar: Any, tokens: int) -> int:
    """The tokens it makes, of so many."""
    for number in range(tokens):
        grammar.fill_bitmask(None, 0)
        if not grammar.accept_tokens("r", [1]):
            return number
    return tokens


def test_an_answer_within_its_budget_is_as_long_as_it_will(grammar: Any) -> None:
    grammar.mask_s = grammar.token_s = TOKEN_S / 2
    assert answer(grammar, 1000) == 1000


@pytest.mark.parametrize("dear", ["mask_s", "token_s"])
def test_one_beyond_it_ends(grammar: Any, dear: str) -> None:
    setattr(grammar, dear, 10 * TOKEN_S)
    made = answer(grammar, 1000)
    assert made < 1000
    assert made * 10 * TOKEN_S == pytest.approx(FIRST_S + made * TOKEN_S, abs=20 * TOKEN_S)
