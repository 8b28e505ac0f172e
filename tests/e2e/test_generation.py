"""Chat and completions through the official SDK: what is said, in which pieces, and how it is counted."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from tests.e2e import prompts
from tests.e2e.reference import Reference
from tests.e2e.stack import TINY, Stack

GO_ON = {"ignore_eos": True}  # for a test that counts tokens: the model may end its answer before


def test_chat_answers_in_the_sdk_s_types(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=TINY, messages=prompts.chat(1), max_tokens=12, temperature=0, extra_body=GO_ON
    )

    assert answer.object == "chat.completion"
    assert answer.model == TINY
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"


def test_every_answer_has_an_id_of_its_own(client: openai.OpenAI) -> None:
    ids = {client.completions.create(model=TINY, prompt="a", max_tokens=1).id for _ in range(5)}

    assert len(ids) == 5


def test_chat_usage_counts_what_the_tokenizer_counts(stack: Stack, client: openai.OpenAI, reference: Reference) -> None:
    messages = prompts.chat(3)
    answer = client.chat.completions.create(
        model=TINY, messages=messages, max_tokens=9, temperature=0, extra_body=GO_ON
    )
    counted = stack.post("/tokenize", {"model": TINY, "messages": messages}).json()

    assert answer.usage is not None
    assert counted["tokens"] == reference.encode_chat(messages)
    assert answer.usage.prompt_tokens == counted["count"] == len(counted["tokens"])
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9


def test_completion_usage_sums_all_prompts_and_choices(
    stack: Stack, client: openai.OpenAI, reference: Reference
) -> None:
    texts = [prompts.text(n) for n in range(3)]
    answer = client.completions.create(
        model=TINY, prompt=texts, n=2, max_tokens=5, temperature=1, seed=1, extra_body=GO_ON
    )
    counts = [stack.post("/tokenize", {"model": TINY, "prompt": text}).json()["count"] for text in texts]

    assert counts == [len(reference.encode(text)) for text in texts]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(counts)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.completion_tokens == 30


def test_completion_of_token_ids_equals_that_of_their_text(client: openai.OpenAI, reference: Reference) -> None:
    asked: dict[str, Any] = {"model": TINY, "max_tokens": 16, "temperature": 0}
    by_text = client.completions.create(prompt=prompts.text(4), **asked)
    by_ids = client.completions.create(prompt=reference.encode(prompts.text(4)), **asked)

    assert by_ids.choices[0].text == by_text.choices[0].text


def test_echo_gives_the_prompt_back(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=TINY, prompt="The river", echo=True, max_tokens=4, temperature=0)

    assert answer.choices[0].text.startswith("The river")
    assert len(answer.choices[0].text) > len("The river")


def test_chat_stream_holds_the_same_text_as_the_whole_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": TINY, "messages": prompts.chat(5), "max_tokens": 40, "temperature": 0}
    asked["extra_body"] = GO_ON
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(stream=True, **asked))

    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_completion_stream_holds_the_same_text_as_the_whole_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": TINY, "prompt": prompts.text(6), "max_tokens": 40, "temperature": 0}
    asked["extra_body"] = GO_ON
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(stream=True, **asked))

    assert len(chunks) > 5
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_include_usage_adds_one_last_chunk_without_choices(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": TINY, "messages": prompts.chat(7), "max_tokens": 11, "temperature": 0}
    asked["extra_body"] = GO_ON
    whole = client.chat.completions.create(**asked)
    *chunks, last = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)

    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 11)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_streams_are_server_sent_events_that_end_with_done(stack: Stack) -> None:
    body = {"model": TINY, "prompt": "The river", "max_tokens": 5, "temperature": 0, "stream": True}
    response = stack.post("/v1/completions", body)

    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line for line in response.text.split("\n\n") if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert events.count("data: [DONE]") == 1


def test_a_stream_arrives_while_it_is_made(stack: Stack) -> None:
    """Pieces come in many reads: nobody on the way holds the answer back until it is complete."""
    body = {"model": TINY, "prompt": "The river", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    with stack.post("/v1/completions", body | {"stream": True}, stream=True) as response:
        sizes = [len(piece) for piece in response.iter_content(chunk_size=None)]

    assert len(sizes) > 20
    assert max(sizes) < sum(sizes) / 4


def test_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": TINY, "prompt": prompts.text(8), "max_tokens": 60, "temperature": 0}
    asked["extra_body"] = GO_ON
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[25:31]  # across token borders
    first = whole.index(stop)
    stopped = client.completions.create(stop=["\x00never", stop], **asked)
    streamed = list(client.completions.create(stop=stop, stream=True, **asked))

    assert stopped.choices[0].text == whole[:first]
    assert stopped.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole[:first]
    assert streamed[-1].choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens < 60


def test_n_gives_different_answers_at_a_temperature(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=TINY,
        messages=prompts.chat(9),
        n=2,
        max_tokens=16,
        temperature=2.0,
        seed=11,
        extra_body=GO_ON,
    )

    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32


def test_n_in_a_stream_keeps_the_answers_apart(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": TINY,
        "prompt": prompts.text(10),
        "n": 2,
        "max_tokens": 16,
        "temperature": 1.0,
        "seed": 12,
    }
    whole = client.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert texts == [choice.text for choice in whole.choices]


def test_seed_fixes_what_is_drawn(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": TINY, "prompt": prompts.text(11), "max_tokens": 24, "temperature": 2.0}
    texts = [client.completions.create(seed=seed, **asked).choices[0].text for seed in (5, 5, 6)]

    assert texts[0] == texts[1] != texts[2]


def test_chat_logprobs_are_probabilities_of_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=TINY,
        messages=prompts.chat(12),
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body=GO_ON | {"skip_special_tokens": False},  # else the token of an end has no text
    )

    (choice,) = answer.choices
    assert choice.logprobs is not None
    reported = choice.logprobs.content
    assert reported is not None
    assert len(reported) == 8
    assert "".join(token.token for token in reported) == choice.message.content
    for token in reported:
        best = [top.logprob for top in token.top_logprobs]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert token.logprob == best[0] <= 0  # greedy: the one taken is the likeliest
        assert sum(map(math.exp, best)) <= 1.0001


def test_completion_logprobs_equal_the_library_s(client: openai.OpenAI, reference: Reference) -> None:
    answer = client.completions.create(
        model=TINY,
        prompt=prompts.text(13),
        max_tokens=8,
        temperature=0,
        logprobs=2,
        extra_body={"return_token_ids": True},
    )

    (choice,) = answer.choices
    reported = choice.logprobs
    assert reported is not None
    assert reported.token_logprobs is not None
    extra = choice.model_extra
    assert extra is not None
    wanted = reference.logprobs(reference.encode(prompts.text(13)), extra["token_ids"])
    assert reported.token_logprobs == pytest.approx(wanted, abs=1e-3)


def test_logit_bias_decides_what_is_generated(client: openai.OpenAI, reference: Reference) -> None:
    (token,) = reference.encode(" water")[:1]
    answer = client.completions.create(
        model=TINY, prompt="The river", max_tokens=6, temperature=0, logit_bias={str(token): 100}
    )

    assert answer.choices[0].text == reference.decode([token]) * 6


def test_max_completion_tokens_bounds_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=TINY, messages=prompts.chat(14), max_completion_tokens=7, temperature=0, extra_body=GO_ON
    )

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.choices[0].finish_reason == "length"


def test_an_answer_ends_where_the_model_s_length_does(client: openai.OpenAI) -> None:
    card = client.models.retrieve(TINY)
    assert card.model_extra is not None
    limit = card.model_extra["max_model_len"]
    answer = client.completions.create(
        model=TINY, prompt=[300] * (limit - 20), max_tokens=100, temperature=0, extra_body=GO_ON
    )

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.choices[0].finish_reason == "length"


def test_each_prompt_of_a_list_is_completed_as_if_it_were_alone(client: openai.OpenAI) -> None:
    texts = [prompts.text(number) for number in range(20)]  # LangChain's default batch
    asked: dict[str, Any] = {"model": TINY, "max_tokens": 4, "temperature": 0, "extra_body": GO_ON}
    answer = client.completions.create(prompt=texts, **asked)
    alone = client.completions.create(prompt=texts[19], **asked)

    assert [choice.index for choice in answer.choices] == list(range(20))
    assert answer.choices[19].text == alone.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 80


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_a_request_is_a_status_also_in_a_stream(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=TINY, messages=prompts.chat(1), logit_bias={"99999999": 1}, max_tokens=2, stream=stream
        )

    assert refused.value.param == "logit_bias"


def test_the_tier_that_served_is_returned(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": TINY, "messages": prompts.chat(1), "max_tokens": 2, "service_tier": "flex"}
    chunks = list(client.chat.completions.create(stream=True, **asked))

    assert client.chat.completions.create(**asked).service_tier == "flex"
    assert [chunk.service_tier for chunk in chunks if chunk.service_tier] == ["flex"]
    assert (
        client.responses.create(model=TINY, input="a", max_output_tokens=16, service_tier="flex").service_tier == "flex"
    )
