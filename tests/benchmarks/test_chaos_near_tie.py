"""Teacher forcing on the built-in model: a greedy answer is one, and an answer with another token is not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from benchmarks.chaos.near_tie import Teacher
from serve_app.engine import ensure_tiny_model

TOKENS = 8


def loaded() -> Any:
    """The model; the library takes seconds to import, in each process that collects this file."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ensure_tiny_model(), dtype=torch.float32)


@functools.cache
def greedy() -> tuple[Teacher, Any, list[int], list[int], list[float]]:
    """A teacher, the tokenizer, a prompt, its greedy tokens, and by how much each beat the second."""
    from transformers import AutoTokenizer

    folder = ensure_tiny_model()
    teacher = Teacher(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = loaded()
    prompt = teacher.prompt("What is serve-app?", chat=True)  # its answer is longer than `TOKENS`
    made = list[int]()
    margins = list[float]()
    for _ in range(TOKENS):
        logits = model(torch.tensor([prompt + made])).logits[0, -1].detach()
        best = logits.topk(2)
        made.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return teacher, tokenizer, prompt, made, margins


def text_of(tokens: list[int]) -> str:
    return str(greedy()[1].decode(tokens, skip_special_tokens=True))


def test_a_greedy_answer_is_a_near_tie_of_itself() -> None:
    teacher, _, prompt, made, _ = greedy()
    assert teacher.is_near_tie(prompt, text_of(made), TOKENS)
    assert teacher.is_near_tie(prompt, text_of(made[:-1]), TOKENS, stopped=True)


def test_one_token_fewer_more_or_another_is_none() -> None:
    teacher, _, prompt, made, margins = greedy()
    assert min(margins) > 1e-3, "the prompt has a tie of its own: choose another"
    assert not teacher.is_near_tie(prompt, text_of(made[:-1]), TOKENS)
    assert not teacher.is_near_tie(prompt, text_of([*made[:3], *made[2:]]), TOKENS + 1)
    assert not teacher.is_near_tie(prompt, text_of([*made[:-1], made[-1] + 1]), TOKENS)


def test_another_token_within_the_bound_is_a_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, _, prompt, made, margins = greedy()
    monkeypatch.setattr("benchmarks.chaos.near_tie.LOGIT", margins[-1] + 1e-6)
    second = int(torch.topk(teacher_logits(prompt + made[:-1]), 2).indices[1])
    assert teacher.is_near_tie(prompt, text_of([*made[:-1], second]), TOKENS)


def teacher_logits(tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = loaded()(torch.tensor([tokens])).logits[0, -1]
    return logits
