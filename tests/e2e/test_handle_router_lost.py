"""A router that dies under calls by handle is a lost connection to the SDK, and another one takes what comes next; and
embeddings and their scores by handle."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai
import pytest

from serve_app.client import Client
from serve_app.errors import Unavailable
from tests.e2e.crashing import kill
from tests.e2e.joined import joined
from tests.e2e.stack import Stack
from tests.e2e.three import EMBED, MODEL, ROUTER, all_routers, processes
from tests.waiting import patient

pytestmark = pytest.mark.long  # test_connection_loss has the same by HTTP

UP_S = 60.0  # a router starts within some seconds
LONG = 3000  # tokens: 15 s


def test_embeddings_and_scores_are_those_over_http(three: Stack) -> None:
    with joined(three) as llm, three.client() as over:
        by_handle = llm.sync.openai.embeddings.create(model=EMBED, input=["a", "b"])
        assert (
            by_handle.model_dump()["data"] == over.embeddings.create(model=EMBED, input=["a", "b"]).model_dump()["data"]
        )
        body = {"model": EMBED, "queries": "a", "documents": ["a", "b"]}
        first, second = (row.embedding for row in by_handle.data)
        cosine = sum(a * b for a, b in zip(first, second, strict=True))
        for asked in (llm.sync.openai, over):
            scored: Any = asked.post("/score", body=body, cast_to=object)
            assert [row["score"] for row in scored["data"]] == pytest.approx([1.0, cosine], abs=1e-6)
        ours = llm.sync.embed(["a", "b"], model=EMBED)
        for item, other in zip(ours.data, by_handle.data, strict=True):
            assert item.embedding == pytest.approx(other.embedding)


async def lost(llm: Client, three: Stack) -> tuple[Any, Any, str]:
    """What a stream of the SDK's and one of ours end with when all routers die, and what the SDK says after that."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": "The river", "max_tokens": LONG}
    async with (
        await llm.openai.completions.create(**asked, stream=True) as sdk,
        llm.stream_complete("The river", model=MODEL, max_tokens=LONG) as ours,
    ):
        await anext(sdk)
        await anext(ours)
        for pid in processes(three, ROUTER):
            kill(pid)
        ends: list[BaseException] = []
        for stream in (sdk, ours):
            try:
                async for _ in stream:
                    pass
            except (openai.OpenAIError, Unavailable) as error:
                ends.append(error)
    after = await llm.openai.completions.create(
        model=MODEL, prompt="x", max_tokens=2, timeout=httpx2.Timeout(patient(UP_S))
    )
    return *ends, after.object


def test_routers_that_die_are_connections_that_are_lost(three: Stack) -> None:
    with joined(three) as llm:
        by_sdk, ours, after = asyncio.run(lost(llm, three))
    assert type(by_sdk) is openai.APIConnectionError
    assert isinstance(by_sdk.__cause__, httpx2.ReadError)
    assert (type(ours), ours.code) == (Unavailable, "connection_lost")
    assert after == "text_completion"
    all_routers(three)
