"""An error of one part of a list, in the words of the client's list."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.core.body_bounds import body_size
from serve_app.errors import BadRequest
from serve_app.http import split_body
from serve_app.http.prompt_list import MergedExchange, PromptExchange
from serve_app.settings import HttpSettings
from serve_app.transport import Frame, TokenUsage
from serve_app.types import Operation


@pytest.mark.parametrize(
    ("operation", "body", "part", "reported", "param", "message"),
    [
        (Operation.COMPLETION, {"prompt": ["a"] * 4}, 3, ("prompt", "your prompt"), "prompt.3", "your prompt"),
        (
            Operation.COMPLETION,
            {"prompt": [[1], [2]]},
            1,
            ("prompt.0", "prompt.0: out"),
            "prompt.1.0",
            "prompt.1.0: out",
        ),
        (Operation.COMPLETION, {"prompt": ["a", "b"]}, 1, ("top_p", "`top_p` a"), "top_p", "`top_p` a"),
        (
            Operation.EMBEDDING,
            {"input": ["a"] * 5},
            1,
            ("input.1", "`input.1` is"),
            "input.4",
            "`input.4` is",
        ),
        (
            Operation.EMBEDDING,
            {"messages": [[{}]] * 5},
            1,
            ("messages.0.2.content.1.type", "no"),
            "messages.3.2.content.1.type",
            "no",
        ),
        (Operation.EMBEDDING, {"input": ["a"] * 5}, 1, ("input", "no"), "input", "no"),
        (
            Operation.RERANK,
            {"query": "a", "documents": ["b"] * 5},
            1,
            ("documents.1", "documents.1: no"),
            "documents.4",
            "documents.4: no",
        ),
        (Operation.RERANK, {"query": "a", "documents": ["b"] * 5}, 1, ("query", "no"), "query", "no"),
        (
            Operation.SCORE,
            {"text_1": ["a"] * 5, "text_2": ["b"] * 5},
            1,
            ("text_1.1.content", "no"),
            "text_1.4.content",
            "no",
        ),
        (Operation.SCORE, {"queries": ["a"], "items": ["b"] * 5}, 1, ("queries.0", "no"), "queries.0", "no"),
        (Operation.SCORE, {"queries": ["a"], "items": ["b"] * 5}, 1, (None, "no"), None, "no"),
    ],
)
def test_the_refusal_of_a_part_names_its_entry_in_the_client_s_list(
    operation: Operation,
    body: dict[str, Any],
    part: int,
    reported: tuple[str | None, str],
    param: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split_body, "INPUTS_TOGETHER", 3)
    answer = json.dumps(
        {"error": {"message": reported[1], "type": "invalid_request_error", "param": reported[0]}}
    ).encode()
    refusal = Frame(1, answer, 400, "json", events=1, usage=TokenUsage())

    split = split_body.split_body(operation, body, body_size(operation, body), HttpSettings())

    async def scenario() -> None:
        merged = MergedExchange(SimpleNamespace(), split)  # type: ignore[arg-type]
        stream: Any = SimpleNamespace(client_has_seen=False)
        with pytest.raises(BadRequest) as whole:
            await PromptExchange(merged, part).relay(stream, [refusal])
        with pytest.raises(BadRequest) as streamed:
            await merged.send_events(part, b"data: " + answer)
        for caught in (whole, streamed):
            assert (caught.value.param, caught.value.message) == (param, message)

    asyncio.run(scenario())
