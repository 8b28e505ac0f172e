"""Tensor parallelism on the CPU: two ranks give what one gives."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.e2e import one_engine, prompts
from tests.e2e.reference import Reference
from tests.e2e.stack import CONFIG, TINY
from tests.requires import requires

PROMPTS = 8
ANSWER_TOKENS = 32


@pytest.mark.long
def test_two_ranks_generate_what_one_generates(
    client: openai.OpenAI, reference: Reference, record_property: Any
) -> None:
    requires("two cores")
    asked = [reference.encode(prompts.text(number)) for number in range(PROMPTS)]
    settings = CONFIG["models"][0] | {"tensor_parallel_size": 2, "kv_cache_gb": 0.25}
    answer = one_engine.run_alone({"settings": settings, "prompts": asked, "max_tokens": ANSWER_TOKENS})

    ties = 0
    for number, (prompt, two) in enumerate(zip(asked, answer["tokens"], strict=True)):
        alone = _one_rank(client, prompt)
        assert len(alone) == len(two) == ANSWER_TOKENS
        comparison = reference.compare(prompt, two)
        assert comparison.mismatch is None, f"prompt {number}: {comparison.mismatch}"
        ties += comparison.ties
        if comparison.ties == 0 == reference.compare(prompt, alone).ties:
            assert two == alone
    record_property("ties", ties)
    print(f"{PROMPTS * ANSWER_TOKENS} tokens of two ranks equal those of one, {ties} of them ties")


def _one_rank(client: openai.OpenAI, prompt: list[int]) -> list[int]:
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(
        model=TINY, prompt=prompt, max_tokens=ANSWER_TOKENS, temperature=0, extra_body=extra
    )
    reported = answer.choices[0].model_extra
    assert reported is not None
    tokens: list[int] = reported["token_ids"]
    return tokens
