"""Items of the input of a response, as vLLM reads them.

OpenAI allows an earlier turn of the assistant to have no part at all, a refusal, several texts; vLLM takes the text of
the first part, and fails where there is none. OpenAI takes such a turn without its id, status and annotations,
reasoning without its id, and an image of a tool's result without its detail: vLLM's models require them.

Invariant: an item gets the fields that it lacks, and a turn its texts as one; a part that is not known is passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The field with the text, by the type of the part.
_TEXT_OF = {"output_text": "text", "input_text": "text", "text": "text", "refusal": "refusal"}
_ID = {"message": "msg", "reasoning": "rs"}  # vLLM reads none of them


def as_vllm_reads(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a response; the client's own is not changed."""
    items = body.get("input")
    if not isinstance(items, list):
        return dict(body)
    return {**body, "input": list(map(_item, items))}


def _item(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    if item.get("type") == "reasoning":
        return {"id": _ID["reasoning"], **_given(item)}
    if item.get("type") == "function_call_output" and isinstance(item.get("output"), list):
        return {**item, "output": [_image(part) for part in item["output"]]}
    is_turn = item.get("role") == "assistant" and item.get("type") in (None, "message")
    if not is_turn or not isinstance(item.get("content"), list):
        return item
    parts = item["content"]
    texts = [_text(part) for part in parts]
    if None not in texts:
        parts = [{"type": "output_text", "text": "".join(filter(None, texts)), "annotations": []}]
    filled = {"id": _ID["message"], "status": "completed", **_given(item)}
    return {**filled, "type": "message", "content": list(map(_part, parts))}


def _given(item: dict[str, Any]) -> dict[str, Any]:
    """The item without its nulls."""
    return {name: value for name, value in item.items() if value is not None}


def _part(part: Any) -> Any:
    is_text = isinstance(part, dict) and part.get("type") == "output_text"
    return {"annotations": [], **_given(part)} if is_text else part


def _image(part: Any) -> Any:
    """A part of a tool's result; an image gets OpenAI's default, which vLLM gives to those of messages alone."""
    is_image = isinstance(part, dict) and part.get("type") == "input_image"
    return {"detail": "auto", **_given(part)} if is_image else part


def _text(part: Any) -> str | None:
    """The text of a part; None: it is no text that is known here."""
    if not isinstance(part, dict):
        return None
    text = part.get(_TEXT_OF.get(str(part.get("type")), ""))
    return text if isinstance(text, str) else None
