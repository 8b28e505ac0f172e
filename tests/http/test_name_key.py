"""What the target of a name is chosen by: the session, else the tenant and the prefix, else the request."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.core.names import ModelRoute, WeightedModel
from serve_app.http.measuring import name_key
from serve_app.types import Operation

BOTH = ModelRoute("chat", (WeightedModel("one", 50), WeightedModel("two", 50)))
SYSTEM = {"role": "system", "content": "You are a clerk. " * 20}


def chat(*texts: str) -> dict[str, Any]:
    return {"model": "chat", "messages": [SYSTEM, *({"role": "user", "content": text} for text in texts)]}


def key(sent: dict[str, Any], tenant: str = "a", session: str | None = None, request: str = "r1") -> str:
    return name_key(Operation.CHAT, sent, tenant, session, request)


def test_the_session_comes_first_within_its_tenant() -> None:
    assert key(chat("hello"), session="s") == key(chat("another"), session="s", request="r2")
    assert key(chat("hello"), session="s") != key(chat("hello"), session="t")
    assert key(chat("hello"), session="s") != key(chat("hello"), session="s", tenant="b")


def test_without_a_session_the_turns_of_a_conversation_have_one_key_within_their_tenant() -> None:
    first = key(chat("hello"))
    assert first == key(chat("hello", "and then?"), request="r2")
    assert first != key(chat("good evening"))
    assert first != key(chat("hello"), tenant="b")


def test_a_messages_request_has_the_key_of_the_chat_that_it_stands_for() -> None:
    sent = {
        "model": "chat",
        "max_tokens": 5,
        "system": SYSTEM["content"],
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert name_key(Operation.MESSAGES, sent, "a", None, "r1") == key(chat("hi"))


@pytest.mark.parametrize(
    ("operation", "sent"),
    [
        (Operation.COMPLETION, {"prompt": ""}),
        (Operation.CHAT, {"messages": []}),
        (Operation.RESPONSES, {"input": ""}),
        (Operation.EMBEDDING, {"input": "hello"}),
    ],
)
def test_what_has_neither_session_nor_prefix_goes_by_its_own_id(operation: Operation, sent: dict[str, Any]) -> None:
    assert [name_key(operation, sent, "a", None, request) for request in ("r1", "r2")] == ["r1", "r2"]


def test_each_order_of_key_spreads_over_the_targets() -> None:
    for keys in (
        [key(chat("hello"), session=f"s{number}") for number in range(20)],
        [key(chat(f"question {number}")) for number in range(20)],
        [name_key(Operation.EMBEDDING, {"input": "x"}, "a", None, f"r{number}") for number in range(20)],
    ):
        assert {BOTH.target(one) for one in keys} == {"one", "two"}
