"""A prompt that no model of this length holds is refused by the router: nothing of it reaches an engine."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.fakes.asgi_client import ask, started
from tests.fakes.engines import MODEL, FakeCluster, model, run

ITEM = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/responses", "input", [ITEM] * 40_000),
        ("/v1/responses/input_tokens", "input", [ITEM] * 40_000),
        ("/v1/chat/completions", "messages", [ITEM] * 80_000),
        ("/tokenize", "messages", [ITEM] * 80_000),
        ("/tokenize", "prompt", "word " * 1_000_000),
        ("/detokenize", "tokens", [1] * 200_000),
    ],
)
def test_a_prompt_beyond_the_model_s_length_ends_at_the_router(path: str, field: str, value: Any) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        assert (await client.post(ask("p"))).status == 200  # the engine has reported its length
        asked: list[Any] = []

        async def submit(submitted: Any, *_: Any) -> None:
            asked.append(submitted)

        cluster["r1"].engine.server.run = submit
        body = gzip.compress(json.dumps({"model": MODEL, field: value}).encode())
        reply = await client.request("POST", path, body, headers={"content-encoding": "gzip"})
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "context_length_exceeded", field)
        assert asked == []

    run(scenario, model(max_model_len=2048))
