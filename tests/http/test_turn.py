"""One turn of a stored conversation: its body with what it continues and refers to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.core.responses import Asked, Chain
from serve_app.errors import BadRequest, NotFound
from serve_app.http.responses.turn import Turn, turn_of
from serve_app.settings import HttpSettings

PARTS = [{"type": "input_text", "text": str(number)} for number in range(300)]
STORED = {"type": "message", "role": "user", "content": PARTS}
TEXT = json.dumps(STORED)


def referring(times: int) -> Turn:
    """A turn that refers to one stored item so many times."""
    items: list[Any] = [{"type": "item_reference", "id": "msg_1"} for _ in range(times)]
    asked = Asked(references=("msg_1",) * times)
    return Turn(asked, "acme", {}, [], 0, {"model": "m", "input": items})


def test_a_reference_counts_each_time_it_occurs() -> None:
    chain = Chain(references={"msg_1": TEXT})
    bounds = HttpSettings(max_json_values=2000)  # an item has some 900 to 1,200, by how they are counted
    assert turn_of(referring(1), chain, bounds).body["input"] == [STORED]
    with pytest.raises(BadRequest, match="values"):
        turn_of(referring(4), chain, bounds)
    assert turn_of(referring(4), chain, HttpSettings()).own == [STORED] * 4


def test_a_reference_that_is_not_there_is_named_where_it_occurs() -> None:
    turn = referring(2)
    turn.sent["input"].insert(0, "a")
    with pytest.raises(NotFound) as caught:
        turn_of(turn, Chain(), HttpSettings())
    assert (caught.value.param, caught.value.code) == ("input.1", "item_not_found")


def test_what_comes_before_is_counted_with_the_references() -> None:
    asked = Asked(previous_id="resp_1", references=("msg_1",))
    turn = Turn(asked, "acme", {}, [], 0, {"input": [{"type": "item_reference", "id": "msg_1"}]})
    before = Chain(ids=("resp_1",), items=(TEXT, TEXT, TEXT), references={"msg_1": TEXT})
    with pytest.raises(BadRequest, match="values"):
        turn_of(turn, before, HttpSettings(max_json_values=2000))
    found = turn_of(turn, before, HttpSettings())
    assert (found.body["input"], found.stored) == ([STORED] * 4, 3)
