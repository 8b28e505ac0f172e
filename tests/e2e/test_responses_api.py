"""The Responses API through the official SDK: without the store, and with it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.e2e import prompts
from tests.e2e.stack import TINY

MESSAGES = prompts.chat(2)
GO_ON = {"ignore_eos": True}  # for a test that counts tokens: the model may end its answer before


def test_a_response_says_what_a_chat_says(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=TINY, input=prompts.text(2), max_output_tokens=15, temperature=0, extra_body=GO_ON
    )
    chat = client.chat.completions.create(
        model=TINY, messages=MESSAGES[-1:], max_tokens=15, temperature=0, extra_body=GO_ON
    )

    assert response.id.startswith("resp_")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, 15)


def test_instructions_are_the_system_turn(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=TINY, instructions="Be brief.", input=prompts.text(3), max_output_tokens=10, temperature=0
    )
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompts.text(3)}]
    chat = client.chat.completions.create(model=TINY, messages=messages, max_tokens=10, temperature=0)

    assert response.output_text == chat.choices[0].message.content


def test_a_whole_conversation_can_be_sent_as_input(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "What is a letter?"},
        {"role": "assistant", "content": "A story."},
        {"role": "user", "content": prompts.text(5)},
    ]
    response = client.responses.create(model=TINY, input=messages, max_output_tokens=10, temperature=0)
    chat = client.chat.completions.create(model=TINY, messages=messages, max_tokens=10, temperature=0)

    assert response.output_text == chat.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parts", [[], [{"type": "refusal", "refusal": "I cannot."}]], ids=["empty", "refusal"])
def test_an_earlier_turn_of_the_assistant_without_a_text_is_answered(
    client: openai.OpenAI, parts: list[Any], stream: bool
) -> None:
    """vLLM fails at both; three of them once ejected the replica for everybody."""
    user = {"role": "user", "content": "The river"}
    turn = {"type": "message", "role": "assistant", "content": parts}
    for _ in range(4):
        answered = client.responses.create(  # type: ignore[call-overload]
            model=TINY, input=[user, turn, user], max_output_tokens=3, stream=stream, extra_body=GO_ON
        )
        last = [*answered][-1].response if stream else answered
        assert last.usage.output_tokens == 3


def test_events_of_a_stream_come_in_order_and_add_up(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": TINY, "input": prompts.text(4), "max_output_tokens": 12, "temperature": 0}
    asked["extra_body"] = GO_ON
    whole = client.responses.create(**asked)
    events = list(client.responses.create(stream=True, **asked))

    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    reported = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert reported == whole.output_text
    assert events[-1].response.output_text == reported
    assert events[-1].response.usage.output_tokens == 12


def test_a_response_is_stored_if_that_is_asked_for(client: openai.OpenAI, batch_client: openai.OpenAI) -> None:
    made = client.responses.create(model=TINY, input="a", max_output_tokens=3, store=True, metadata={"a": "b"})
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    (item,) = client.responses.input_items.list(made.id).data
    assert item.to_dict()["content"] == [{"type": "input_text", "text": "a"}]
    for stranger in (lambda: batch_client.responses.retrieve(made.id), lambda: batch_client.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError, match=made.id):
            stranger()
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    not_stored = client.responses.create(model=TINY, input="a", max_output_tokens=1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(not_stored.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_continues_another_is_answered_as_the_whole_conversation(
    client: openai.OpenAI, stream: bool
) -> None:
    fixed: dict[str, Any] = {"model": TINY, "max_output_tokens": 8, "temperature": 0, "extra_body": GO_ON}
    history: list[Any] = []
    previous = None
    turn: Any = None
    for number in (2, 3, 4):
        asked: dict[str, Any] = {"input": prompts.text(number), "store": True, "previous_response_id": previous}
        if stream:
            with client.responses.create(stream=True, **fixed, **asked) as events:
                *_, last = events  # `response.incomplete`, which the SDK's own helper does not take for an end
                turn = last.response
        else:
            turn = client.responses.create(**fixed, **asked)
        history.append({"role": "user", "content": prompts.text(number)})
        whole = client.responses.create(input=history, **fixed)
        assert turn.output_text == whole.output_text
        assert turn.usage is not None
        assert whole.usage is not None
        assert turn.usage.input_tokens == whole.usage.input_tokens
        history += turn.output
        previous = turn.id
    items = client.responses.input_items.list(str(previous), order="asc").data
    reference: Any = {"type": "item_reference", "id": items[0].id}
    referred = client.responses.create(input=[*history[:-2], reference], **fixed)
    assert referred.output_text == turn.output_text


@pytest.mark.parametrize(("field", "value"), [("background", "yes"), ("conversation", "conv_1")])
def test_what_is_not_supported_is_refused_by_name(client: openai.OpenAI, field: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError, match=field) as caught:
        client.responses.create(model=TINY, input="a", **{field: value})  # type: ignore[call-overload]

    assert caught.value.param == field


def test_a_background_response_is_streamed_left_taken_up_and_another_cancelled(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": TINY, "input": prompts.text(4), "temperature": 0, "extra_body": GO_ON}
    whole = client.responses.create(max_output_tokens=40, **asked)
    with client.responses.create(background=True, stream=True, max_output_tokens=40, **asked) as stream:
        begun = next(iter(stream))
    assert begun.type == "response.created"
    assert begun.response.status == "queued"
    name = begun.response.id
    events = list(client.responses.retrieve(name, stream=True, starting_after=begun.sequence_number))
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    final: Any = events[-1]
    assert final.response.output_text == whole.output_text
    assert client.responses.retrieve(name).output_text == whole.output_text
    rest = list(client.responses.retrieve(name, stream=True, starting_after=events[-3].sequence_number))
    assert rest == events[-2:]
    long = client.responses.create(background=True, max_output_tokens=4000, **asked)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"


def test_a_wrong_class_is_refused_in_a_response_too(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=TINY, input="a", service_tier="gold")  # type: ignore[call-overload]

    assert caught.value.param == "service_tier"
