"""Items of a conversation: those of an input, their ids, and the whole input of a turn that continues another.

Invariant: the turns before come first, in their order, and an item is given to the engine as it was stored. An id of an
input item is the client's own where that is one, else a new one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
_IN_INPUT = re.compile(r"\binput\.(\d{1,9})((?:\.\w+)*)")
ITEM_ID = re.compile(r"[\x21-\x7e]{1,64}")
MESSAGE = "message"
REFERENCE = "item_reference"
PREVIOUS = "previous_response_id"
_PREFIXES = {MESSAGE: "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_ASSISTANT = "assistant"


class MissingItem(Exception):
    """An item of the input refers to one that is not stored; `path` is its place."""

    def __init__(self, path: str, item_id: str) -> None:
        super().__init__(path, item_id)
        self.path = path
        self.item_id = item_id


def item_references(given: Any) -> dict[str, str]:
    """The items of an input that stand for a stored one: the stored one's id, by the place of each."""
    found: dict[str, str] = {}
    for number, item in enumerate(given if type(given) is list else ()):
        if type(item) is dict and item.get("type") == REFERENCE and type(item.get("id")) is str:
            found[f"input.{number}"] = item["id"]
    return found


def own_items(given: Any, stored: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """The items of an input, each reference as the item that it stands for.

    Raises:
        MissingItem: one is not in `stored`.
    """
    if given is None:
        return []
    if type(given) is not list:
        return [{"type": MESSAGE, "role": "user", "content": given}]
    items = list(given)
    for path, item_id in item_references(given).items():
        if item_id not in stored:
            raise MissingItem(path, item_id)
        items[int(path.rpartition(".")[2])] = _for_engine(stored[item_id])
    return items


def expanded(body: Mapping[str, Any], before: Sequence[Mapping[str, Any]], own: Sequence[Any]) -> dict[str, Any]:
    """The body with the whole conversation as its input: the stored items `before`, then its own."""
    return {**body, "input": [*map(_for_engine, before), *own]}


def own_path(text: str, stored: int) -> str:
    """A path in the input of a whole conversation, or a message with one, in terms of the body that was sent: `stored`
    items come before its own."""

    def renamed(found: re.Match[str]) -> str:
        number = int(found[1]) - stored
        return f"input.{number}{found[2]}" if number >= 0 else PREVIOUS

    return _IN_INPUT.sub(renamed, text) if stored else text


def input_items(own: Iterable[Any], new_id: Callable[[str], str]) -> list[dict[str, Any]]:
    """The items of an input as they are stored and listed, each with an id. `new_id`: makes one of a prefix. What is no
    object is left out: the engine has refused it."""
    return [_listed(item, new_id) for item in own if type(item) is dict]


def with_id(item: Mapping[str, Any], new_id: Callable[[str], str]) -> dict[str, Any]:
    """The item with an id that can be stored."""
    given = item.get("id")
    if type(given) is str and ITEM_ID.fullmatch(given) is not None:
        return dict(item)
    return {**item, "id": new_id(_PREFIXES.get(str(item.get("type")), "item"))}


def _listed(item: dict[str, Any], new_id: Callable[[str], str]) -> dict[str, Any]:
    if item.get("type") is None and "role" in item:
        item = {"type": MESSAGE, **{name: value for name, value in item.items() if name != "type"}}
    item = with_id(item, new_id)
    if item.get("type") != MESSAGE:
        return item
    content = item.get("content")
    if type(content) is str:
        text = {"type": "output_text", "annotations": []} if item.get("role") == _ASSISTANT else {"type": "input_text"}
        item["content"] = [{**text, "text": content}]
    return {"status": "completed", **item}


def _for_engine(item: Mapping[str, Any]) -> dict[str, Any]:
    """A stored item as a client would send it: a message of anyone but the assistant has no id and no status."""
    if item.get("type") == MESSAGE and item.get("role") != _ASSISTANT:
        return {name: value for name, value in item.items() if name not in ("id", "status")}
    return dict(item)
