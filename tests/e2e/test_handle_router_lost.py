"""A router that dies under calls by handle is a lost connection to the SDK, and another one takes what comes next.
The stack here serves embeddings and their scores, too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from benchmarks.common.processes import title_of
from serve_app.client import Client
from serve_app.errors import Unavailable
from tests.e2e import stack as stacks
from tests.e2e.crashing import kill
from tests.e2e.joined import joined
from tests.e2e.observe import within
from tests.e2e.stack import Stack
from tests.requires import requires

MODEL, EMBED, ROUTERS = "tiny-sim", "embed-sim", 2
CONFIG: dict[str, Any] = {
    "models": [
        {"name": MODEL, "engine": "simulated", "max_num_seqs": 8, "simulated": {"decode_step_s": 0.01}},
        {"name": EMBED, "engine": "simulated", "max_num_seqs": 8, "task": "embed", "cpus_per_rank": 0.5},
    ],
    "router": {"replicas": ROUTERS},
}
UP_S = 60.0  # a router starts within some seconds
TITLE = "ray::ServeReplica:serve_app:Router"
LONG = 3000  # tokens: 30 s


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    requires("linux")
    with stacks.own(tmp_path_factory.mktemp("lost"), CONFIG, "lost") as started:
        within(UP_S, lambda: len(routers(started)), ROUTERS, "routers")
        yield started


def routers(there: Stack) -> list[int]:
    assert there.cluster is not None
    return [pid for pid in there.cluster.pids() if title_of(pid).startswith(TITLE)]


def test_embeddings_and_scores_are_those_over_http(there: Stack) -> None:
    with joined(there) as llm, there.client() as over:
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
        for one, other in zip(ours.data, by_handle.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding)


async def lost(llm: Client, there: Stack) -> tuple[Any, Any, str]:
    """What a stream of the SDK's and one of ours end with when all routers die, and what the SDK says after that."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": "The river", "max_tokens": LONG}
    async with (
        await llm.openai.completions.create(**asked, stream=True) as sdk,
        llm.stream_complete("The river", model=MODEL, max_tokens=LONG) as ours,
    ):
        await anext(sdk)
        await anext(ours)
        for pid in routers(there):
            kill(pid)
        ends: list[BaseException] = []
        for stream in (sdk, ours):
            try:
                async for _ in stream:
                    pass
            except (openai.OpenAIError, Unavailable) as error:
                ends.append(error)
    after = await llm.openai.completions.create(
        model=MODEL, prompt="x", max_tokens=2, timeout=httpx2.Timeout(UP_S, connect=UP_S)
    )
    return *ends, after.object


def test_routers_that_die_are_connections_that_are_lost(there: Stack) -> None:
    with joined(there) as llm:
        by_sdk, ours, after = asyncio.run(lost(llm, there))
    assert type(by_sdk) is openai.APIConnectionError
    assert isinstance(by_sdk.__cause__, httpx2.ReadError)
    assert (type(ours), ours.code) == (Unavailable, "connection_lost")
    assert after == "text_completion"
