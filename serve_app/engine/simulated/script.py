"""What a simulated engine plays by script: turns of thoughts, text and calls of tools, one token at a time. Pure.

Of the script count the turns whose calls need no tool that the request lacks: one script serves several agents, which
also ask without tools (for a title). The conversation gets these turns one after the other, over and over.

Invariant: the tokens of an answer depend on the script and the request only, so that another replica can continue it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from serve_app.engine.simulated.requests import Generation, parse_generation
from serve_app.engine.simulated.text import Piece, SimulatedChoice
from serve_app.errors import BadRequest
from serve_app.settings import ScriptedTurn
from serve_app.types import Operation

PLAYED = frozenset({Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES})
PIECE_CHARS = 8  # of a token
_ANSWERS = ("assistant", "function_call", "reasoning")  # roles and types of items that are a part of an answer


@dataclass(frozen=True, slots=True)
class Part:
    """A block of an answer. Of a call `text` has the arguments as JSON, `name` its tool, `call` its number."""

    kind: Literal["reasoning", "text", "call"]
    text: str
    name: str = ""
    call: int = 0


def parts_of(turn: ScriptedTurn) -> list[Part]:
    """The blocks of a turn in the order in which they are sent."""
    parts = [Part("reasoning", turn.reasoning or ""), Part("text", turn.text or "")]
    calls = [Part("call", json.dumps(one.arguments), one.name, at) for at, one in enumerate(turn.calls)]
    return [part for part in parts if part.text] + calls


def scripted(
    operation: Operation, body: dict[str, Any], script: Sequence[ScriptedTurn], *, seed: int, max_model_len: int
) -> tuple[Generation, list[Part]]:
    """A request, and the blocks of the turn that answers it.

    Raises:
        BadRequest: as of `parse_generation`, or it asks for several answers.
    """
    asked = _as_chat(body) if operation is Operation.RESPONSES else body
    generation = parse_generation(Operation.CHAT, asked, seed=seed, max_model_len=max_model_len)
    if len(generation.choices) > 1:
        raise BadRequest("n: an engine that plays a script gives one answer", param="n")
    parts = parts_of(_turn(script, body))
    pieces = tuple(
        Piece(number, part.text[at : at + PIECE_CHARS])
        for number, part in enumerate(parts)
        for at in range(0, len(part.text), PIECE_CHARS)
    )
    (choice,) = generation.choices
    bound = _bound(asked, max_model_len - choice.prompt_tokens)
    played = SimulatedChoice(0, choice.key, choice.prompt_tokens, min(bound, len(pieces)), None, pieces)
    return replace(generation, choices=(played,), ignored=()), parts


def _bound(asked: Mapping[str, Any], room: int) -> int:
    return min(room, asked.get("max_completion_tokens") or asked.get("max_tokens") or room)


def _as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """What is read of a Responses request, as a chat."""
    given = body.get("input")
    text = given if isinstance(given, str) else json.dumps(given)
    message = {"role": "user", "content": f"{body.get('instructions') or ''}\n{text}"}
    more = {name: body.get(name) for name in ("stream", "tools")}
    return {"messages": [message], "max_tokens": body.get("max_output_tokens"), **more}


def _turn(script: Sequence[ScriptedTurn], body: Mapping[str, Any]) -> ScriptedTurn:
    tools = set(_tool_names(body.get("tools")))
    turns = [turn for turn in script if {call.name for call in turn.calls} <= tools]
    return turns[_answers_in(body) % len(turns)]


def _answers_in(body: Mapping[str, Any]) -> int:
    """Answers of the model in a conversation: consecutive messages or items are one."""
    turns = body.get("messages", body.get("input"))
    entries = [one for one in turns if isinstance(one, dict)] if isinstance(turns, list) else []
    kinds = [one.get("role") or one.get("type") for one in entries]
    return sum(is_answer for is_answer, _ in groupby(kinds, lambda kind: kind in _ANSWERS))


def _tool_names(tools: Any) -> Iterator[str]:
    """The names of functions, in a chat's form and in that of Responses."""
    for tool in tools if isinstance(tools, list) else ():
        held = tool.get("function", tool) if isinstance(tool, dict) else {}
        if isinstance(held, dict) and isinstance(held.get("name"), str):
            yield held["name"]
