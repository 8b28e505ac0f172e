"""Conversations that the store keeps, over three routers and two simulated engines, some of which are killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.stack import BATCH_KEY, Stack
from tests.e2e.test_connection_loss import engines, settle
from tests.e2e.three import WIDE, all_routers, process

pytestmark = pytest.mark.long  # its kills take minutes; tests/http/responses has each end of a turn

TURNS = 20
TOKENS = 20  # 0.2 s of the engine's time
KILLED_TOKENS = 150  # of a turn in which something is killed, 1.5 s
ROUTER_LOST = 5  # the turn in which its router is killed
ENGINES_LOST = (9, 15)  # in which one engine is killed, then the other: the conversation is on one of them
REPEATS = 5


def stream_of(client: openai.OpenAI, asked: dict[str, Any], kill: int | None) -> Any:
    """The response at the end of a stream; a process is killed once its text has begun."""
    last = None
    for event in client.responses.create(stream=True, **asked):
        if kill is not None and event.type == "response.output_text.delta":
            os.kill(kill, signal.SIGKILL)
            kill = None
        last = event
    if last is None or last.type not in ("response.completed", "response.incomplete"):
        raise ConnectionError("the stream ended before its response")
    return last.response


def test_a_conversation_of_twenty_turns_loses_none_while_a_router_and_engines_are_killed(three: Stack) -> None:
    settle(three)
    first_engines = engines(three)
    history: list[Any] = []
    turns: list[Any] = []
    broken = 0
    for number in range(TURNS):
        text = f"turn {number} of this conversation"
        tokens = KILLED_TOKENS if number in (ROUTER_LOST, *ENGINES_LOST) else TOKENS
        previous = turns[-1].id if turns else None
        asked: dict[str, Any] = {"model": WIDE, "input": text, "max_output_tokens": tokens, "store": True}
        asked["previous_response_id"] = previous
        routers = all_routers(three)
        router = routers[number % len(routers)]
        kill = process(three, router) if number == ROUTER_LOST else None
        if number in ENGINES_LOST:
            kill = first_engines[ENGINES_LOST.index(number)]
        for _ in range(REPEATS):
            try:
                with router.client() as client:
                    turn = stream_of(client, asked, kill) if number % 2 else client.responses.create(**asked)
                break
            except (openai.APIError, httpx2.TransportError, ConnectionError):
                broken += 1
                kill = None
                router = next(one for one in all_routers(three) if one != router)
        else:
            pytest.fail(f"turn {number} was not answered")
        assert turn.previous_response_id == previous
        history += [{"role": "user", "content": text}, *turn.output]
        turns.append(turn)
    print(f"{broken} of {TURNS} turns were sent again")

    with three.client(max_retries=REPEATS) as client, three.client(BATCH_KEY, max_retries=REPEATS) as stranger:
        kept = [client.responses.retrieve(turn.id) for turn in turns]
        assert [one.output_text for one in kept] == [turn.output_text for turn in turns]
        again: Any = {"role": "user", "content": "again"}
        last = client.responses.create(
            model=WIDE, input=[again], previous_response_id=turns[-1].id, max_output_tokens=TOKENS
        )
        whole = client.responses.create(model=WIDE, input=[*history, again], max_output_tokens=TOKENS)
        assert last.output_text == whole.output_text
        assert last.usage == whole.usage
        for turn in turns:
            with pytest.raises(openai.NotFoundError):
                stranger.responses.retrieve(turn.id)
        with pytest.raises(openai.NotFoundError, match=turns[-1].id):
            stranger.responses.create(model=WIDE, input="what did they say?", previous_response_id=turns[-1].id)
    settle(three)
