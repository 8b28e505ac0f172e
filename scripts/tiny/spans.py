"""Text with the weight of each part in the loss, and the turns of a conversation as the chat template renders them.

Invariant: the texts of a conversation's spans, joined, are what `chat_template.jinja` renders; and each span begins
and ends where the tokenizer splits text anyway, so that its tokens are those of the whole text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

TURN = "<|turn|>"
END = "<|end|>"
CALL = "<tool_call>"
CALL_END = "</tool_call>"

CONTEXT = 0.1  # weight of text that the model is given: it learns a little language from it
LEARNED = 1.0  # weight of its own answers
FORCED = (
    0.05  # weight of the first token of an answer that a grammar would demand: below the usual one, above all others
)


class Span(NamedTuple):
    """A piece of text and the weight of its tokens in the loss."""

    text: str
    weight: float


Spans = tuple[Span, ...]


def given(role: str, text: str) -> Spans:
    """A turn that the model does not write."""
    return Span(f"{TURN}{role}\n", 0.0), Span(text, CONTEXT), Span(f"{END}\n", 0.0)


def answer(*parts: Span) -> Spans:
    """A turn of the model, which ends by itself."""
    return Span(f"{TURN}assistant\n", 0.0), *parts, Span(END, LEARNED), Span("\n", 0.0)


def plain(text: str) -> Spans:
    """A turn of the model in plain text."""
    return answer(Span(text, LEARNED))


def called(name: str, arguments: Mapping[str, Any], *, is_forced: bool = False) -> Spans:
    """A turn of the model that calls a tool."""
    text = f'{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}'
    return answer(Span(CALL, FORCED if is_forced else LEARNED), Span(text, LEARNED), Span(CALL_END, LEARNED))


def system(text: str, tools: Sequence[Mapping[str, Any]]) -> Spans:
    """The first turn: the client's instructions and the tools. Nothing if there is neither."""
    if not (text or tools):
        return ()
    parts = [text] if text else []
    if tools:
        lines = [json.dumps(tool) for tool in tools]
        usage = f'Call one with {CALL}{{"name": "...", "arguments": {{}}}}{CALL_END}'
        parts.append("\n".join(["Functions:", *lines, usage]))
    return given("system", "\n\n".join(parts))


def text_of(spans: Iterable[Span]) -> str:
    return "".join(span.text for span in spans)
