"""An error of a living engine is the request's: it is told once, repeated nowhere, and says nothing of the replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.core.routing.outliers import MAX_CONSECUTIVE_FAILURES
from serve_app.errors import RequestFailed
from serve_app.transport import Frame
from tests.fakes.engines import FakeCluster, run
from tests.fakes.failing_engines import NEVER, takes
from tests.fakes.router import Router


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("begun", [False, True], ids=["before its first frame", "after it"])
def test_a_request_that_an_engine_cannot_handle_ends_there_and_ejects_nobody(begun: bool, replicas: int) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        names = [f"r{number}" for number in range(replicas)]
        await cluster.add(*names)
        router = await Router(cluster).start()
        runs = {name: cluster[name].engine.backend.run for name in names}

        async def unforeseen(submit: Any) -> AsyncIterator[Frame]:
            if begun:
                yield Frame(submit.number, b"data: ", 200, "sse", events=1)
            raise IndexError("list index out of range")

        for name in names:
            cluster[name].engine.backend.run = unforeseen  # type: ignore[method-assign, assignment]
        asked = 4 * MAX_CONSECUTIVE_FAILURES * replicas
        for number in range(asked):
            with pytest.raises(RequestFailed, match="IndexError: list index out of range"):
                await router.ask()
            assert len(cluster.submits) == number + 1, "one attempt each"
        assert set(takes(router).values()) == {"all"}
        assert not any(router.model.replica_set.ejections.values())
        assert not sum(trace.losses for trace in router.traces.values())
        for name in names:
            cluster[name].engine.backend.run = runs[name]  # type: ignore[method-assign]
        await asyncio.gather(*(router.ask() for _ in range(4)))
        await router.settled()

    run(scenario, waits=NEVER)
