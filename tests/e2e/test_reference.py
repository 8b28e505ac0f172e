"""The whole stack against the `transformers` library on the same float32 weights."""

from __future__ import annotations

from typing import Any

import openai

from tests.e2e import prompts
from tests.e2e.reference import TIE_LOGIT, Reference
from tests.e2e.stack import TINY

PROMPTS = 20
ANSWER_TOKENS = 64
MAX_TIE_SHARE = 0.02  # two of 2048 logits that deviate by 4 are closer than 1e-3 in about one place of a thousand


def test_greedy_output_equals_the_library_s_for_20_prompts(
    client: openai.OpenAI, reference: Reference, record_property: Any
) -> None:
    """Half of them as chats; the token ids of the prompts have to be equal, too."""
    compared = 0
    ties = 0
    for number in range(PROMPTS):
        prompt, produced, text = _ask(client, reference, number)
        comparison = reference.compare(prompt, produced)
        assert comparison.mismatch is None, f"prompt {number}: {comparison.mismatch}"
        assert text == reference.decode(produced)
        compared += comparison.tokens
        ties += comparison.ties
    print(f"{compared} tokens of {PROMPTS} prompts equal, {ties} of them ties within {TIE_LOGIT}")
    record_property("tokens", compared)
    record_property("ties", ties)
    assert compared == PROMPTS * ANSWER_TOKENS
    assert ties <= MAX_TIE_SHARE * compared


def _ask(client: openai.OpenAI, reference: Reference, number: int) -> tuple[list[int], list[int], str]:
    """The prompt's ids by the library's own tokenizer and template, the produced ids, the text."""
    asked: dict[str, Any] = {"model": TINY, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    extra = {"return_token_ids": True, "ignore_eos": True}
    if number % 2:
        answer: Any = client.chat.completions.create(messages=prompts.chat(number), extra_body=extra, **asked)
        prompt = reference.encode_chat(prompts.chat(number))
        assert answer.model_extra["prompt_token_ids"] == prompt
        text = answer.choices[0].message.content
    else:
        answer = client.completions.create(prompt=prompts.text(number), extra_body=extra, **asked)
        prompt = reference.encode(prompts.text(number))
        assert answer.choices[0].model_extra["prompt_token_ids"] == prompt
        text = answer.choices[0].text
    produced: list[int] = answer.choices[0].model_extra["token_ids"]
    return prompt, produced, text


def test_the_comparison_itself_sees_one_wrong_token(reference: Reference) -> None:
    prompt = reference.encode(prompts.text(1))
    right = reference.greedy(prompt, 12)
    wrong = list(right)
    wrong[7] = (wrong[7] + 1) % 2000

    assert reference.compare(prompt, right).mismatch is None
    reported = reference.compare(prompt, wrong)
    assert reported.mismatch is not None
    assert reported.tokens == 7


def test_a_long_prompt_over_many_prefill_steps_equals_the_library_s(
    client: openai.OpenAI, reference: Reference
) -> None:
    prompt = reference.encode(" ".join(prompts.text(number) for number in range(160)))[:1900]
    assert len(prompt) == 1900
    answer = client.completions.create(
        model=TINY,
        prompt=prompt,
        max_tokens=32,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    extra = answer.choices[0].model_extra
    assert extra is not None
    compared = reference.compare(prompt, extra["token_ids"])
    assert compared.mismatch is None
    assert compared.tokens == 32
