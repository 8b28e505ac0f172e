"""The output of the simulated engine in Anthropic's form: a message of one text.

Invariant: as of `Writer`: the bytes of a response depend on its tokens only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from serve_app.engine.simulated.text import TOKEN_CHARS, SimulatedChoice, text_of, token_group

_DELTA = {"type": "content_block_delta", "index": 0}


class MessageWriter:
    """The bytes of one response to a Messages request. Every output token is one SSE event of text, however many are
    written at once.

    Args:
        stops: the stop sequences of the request.
    """

    def __init__(self, request_id: str, model: str, stops: Sequence[str]) -> None:
        self._fields = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._stops = stops

    def tokens(self, choice: SimulatedChoice, start: int, stop: int) -> tuple[bytes, list[int]]:
        """The events of tokens `start` to `stop`, and the token group behind them. The message begins before the first
        token, and its text ends after the last one."""
        body = b""
        if not start:
            usage = {"input_tokens": choice.prompt_tokens, "output_tokens": 0}
            body = _event({"type": "message_start", "message": self._message(None, None, [], usage)})
            body += _event({"type": "content_block_start", "index": 0, "content_block": _text("")})
        for at in range(start, stop):
            text = text_of(choice.key, at, at + 1)
            if choice.cut is not None:
                text = text[: max(0, choice.cut - at * TOKEN_CHARS)]
            if text:
                body += _event(_DELTA | {"delta": {"type": "text_delta", "text": text}})
        if stop == choice.max_tokens:
            body += _event({"type": "content_block_stop", "index": 0})
            body += _event({"type": "message_delta", "delta": self._end(choice), "usage": _usage(choice)})
        return body, token_group(choice, start, stop)

    def end(self, usage: dict[str, int] | None) -> bytes:
        """The end of the stream; its usage came with the last token."""
        return _event({"type": "message_stop"})

    def document(self, choices: Sequence[SimulatedChoice], usage: dict[str, int]) -> bytes:
        """The whole response of a request that is not streamed."""
        (choice,) = choices
        text = text_of(choice.key, 0, choice.max_tokens)[: choice.cut]
        end = self._end(choice)
        message = self._message(end["stop_reason"], end["stop_sequence"], [_text(text)], _usage(choice))
        return json.dumps(message, separators=(",", ":")).encode()

    def _message(
        self, reason: str | None, sequence: str | None, content: list[dict[str, str]], usage: dict[str, int]
    ) -> dict[str, Any]:
        ended = {"content": content, "stop_reason": reason, "stop_sequence": sequence, "usage": usage}
        return {**self._fields, **ended}

    def _end(self, choice: SimulatedChoice) -> dict[str, str | None]:
        if choice.cut is None:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        rest = text_of(choice.key, 0, choice.max_tokens)[choice.cut :]
        found = min((stop for stop in self._stops if rest.startswith(stop)), key=len)
        return {"stop_reason": "stop_sequence", "stop_sequence": found}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _usage(choice: SimulatedChoice) -> dict[str, int]:
    return {"input_tokens": choice.prompt_tokens, "output_tokens": choice.max_tokens}


def _event(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
