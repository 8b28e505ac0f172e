"""The output of the simulated engine in the form of OpenAI's Responses API: a message of one text.

Invariant: as of `Writer`: the bytes of a response depend on its tokens only. Every event has its number, so an answer
that is continued elsewhere goes on with the next one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.engine.simulated.text import TOKEN_CHARS, SimulatedChoice, text_of, token_group

_BEFORE_TEXT = 4  # events: the response twice, its item, and the part of that
_PLACE = {"output_index": 0, "content_index": 0}


class ResponseWriter:
    """The bytes of one response. Every output token is one SSE event of text, however many are written at once.

    Args:
        body: of the request; what it set is in the response.
    """

    def __init__(self, request_id: str, model: str, created: int, body: Mapping[str, Any]) -> None:
        self._item_id = f"msg_{request_id}"
        self._fields = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": created,
            "model": model,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "max_output_tokens": body.get("max_output_tokens"),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "temperature": body.get("temperature", 1.0),
            "top_p": body.get("top_p", 1.0),
            "tool_choice": "auto",
            "tools": body.get("tools", []),
            "truncation": "disabled",
            "error": None,
        }

    def tokens(self, choice: SimulatedChoice, start: int, stop: int) -> tuple[bytes, list[int]]:
        """The events of tokens `start` to `stop`, and the token group behind them. The response begins before the first
        token, and its item ends after the last one."""
        body = b""
        at = _BEFORE_TEXT + start
        if not start:
            item = self._item("in_progress", [])
            for number, kind in enumerate(("created", "in_progress")):
                body += _event(number, kind, response=self._response("in_progress", [], None))
            body += _event(2, "output_item.added", output_index=0, item=item)
            body += _event(3, "content_part.added", item_id=self._item_id, part=_text(""), **_PLACE)
        for token in range(start, stop):
            text = text_of(choice.key, token, token + 1)
            if choice.cut is not None:
                text = text[: max(0, choice.cut - token * TOKEN_CHARS)]
            delta = {"item_id": self._item_id, "delta": text, "logprobs": [], **_PLACE}
            body += _event(at, "output_text.delta", **delta)
            at += 1
        if stop == choice.max_tokens:
            whole = self._whole(choice)
            done = {"item_id": self._item_id, "text": whole, "logprobs": [], **_PLACE}
            body += _event(at, "output_text.done", **done)
            body += _event(at + 1, "content_part.done", item_id=self._item_id, part=_text(whole), **_PLACE)
            ended = self._ended(choice)
            body += _event(at + 2, "output_item.done", output_index=0, item=ended["output"][0])
            body += _event(at + 3, ended["status"], response=ended)
        return body, token_group(choice, start, stop)

    def end(self, usage: dict[str, int] | None) -> bytes:
        """Nothing: the last event came with the last token."""
        return b""

    def document(self, choices: Sequence[SimulatedChoice], usage: dict[str, int]) -> bytes:
        """The whole response of a request that is not streamed."""
        (choice,) = choices
        return json.dumps(self._ended(choice), separators=(",", ":")).encode()

    def _ended(self, choice: SimulatedChoice) -> dict[str, Any]:
        status = "incomplete" if choice.cut is None else "completed"
        usage = {
            "input_tokens": choice.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": choice.max_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": choice.prompt_tokens + choice.max_tokens,
        }
        return self._response(status, [self._item(status, [_text(self._whole(choice))])], usage)

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**self._fields, "status": status, "incomplete_details": details, "output": output, "usage": usage}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _whole(self, choice: SimulatedChoice) -> str:
        return text_of(choice.key, 0, choice.max_tokens)[: choice.cut]


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _event(number: int, kind: str, **fields: Any) -> bytes:
    value = {"type": f"response.{kind}", "sequence_number": number, **fields}
    return f"event: {value['type']}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
