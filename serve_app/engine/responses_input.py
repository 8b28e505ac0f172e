"""Earlier turns of the assistant in the input of a response, as vLLM reads them: with exactly one part, a text.

OpenAI allows more: no part at all, a refusal, several texts. vLLM takes the text of the first part, and fails where
there is none.

Invariant: what is no such turn, or has a part that is not known here, is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The field with the text, by the type of the part.
_TEXT_OF = {"output_text": "text", "input_text": "text", "text": "text", "refusal": "refusal"}


def as_vllm_reads(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a response; the client's own is not changed."""
    items = body.get("input")
    if not isinstance(items, list):
        return dict(body)
    return {**body, "input": [_turn(item) if _is_assistants(item) else item for item in items]}


def _is_assistants(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and item.get("role") == "assistant"
        and item.get("type", "message") == "message"
        and isinstance(item.get("content"), list)
    )


def _turn(item: dict[str, Any]) -> dict[str, Any]:
    texts = [_text(part) for part in item["content"]]
    if any(text is None for text in texts):
        return item
    told = {"type": "output_text", "text": "".join(filter(None, texts)), "annotations": []}
    return {**item, "type": "message", "content": [told]}


def _text(part: Any) -> str | None:
    """The text of a part; None: it is no text that is known here."""
    if not isinstance(part, dict):
        return None
    text = part.get(_TEXT_OF.get(str(part.get("type")), ""))
    return text if isinstance(text, str) else None
