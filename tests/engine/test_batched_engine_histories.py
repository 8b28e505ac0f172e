"""Random arrivals, cancels, failures, changes and deaths before a batched engine: every request ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.batching import PRESETS, BatchPolicy
from serve_app.errors import EngineFailed
from serve_app.transport import Frame, Submit
from tests.engine.batched import Replica, answer, run
from tests.fakes.timed_engine import TimedEngine, submit
from tests.fakes.virtual_time import now

POLICIES = [policy for policy in PRESETS.values() if not policy.is_continuous] + [
    BatchPolicy(3),
    BatchPolicy(2, 1.0, 20),
]
SECONDS = st.integers(0, 8).map(float)
REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "arrives": SECONDS,
            "seconds": SECONDS,
            "cancelled_after": st.none() | SECONDS,
            "fails": st.booleans(),
            "prompt": st.integers(1, 200),
        }
    ),
    max_size=40,
)


@given(
    REQUESTS,
    st.sampled_from(POLICIES),
    st.none() | st.tuples(SECONDS, st.sampled_from(POLICIES)),
    st.none() | st.integers(0, 12).map(float),
)
def test_every_request_ends_and_there_are_never_two_batches_at_once(
    requests: list[dict[str, Any]],
    policy: BatchPolicy,
    change: tuple[float, BatchPolicy] | None,
    dies_at: float | None,
) -> None:
    async def scenario(engine: Replica, inner: TimedEngine) -> None:
        batch_of: dict[int, int] = {}
        run_inside = inner.run

        async def watched(asked: Submit) -> AsyncGenerator[Frame, None]:
            batch_of[asked.number] = engine.load().batches  # it has just started
            async with contextlib.aclosing(run_inside(asked)) as frames:
                async for frame in frames:
                    together = {batch_of[number] for number in inner.runs}
                    assert len(together) == 1, f"batches {together} run at once"
                    yield frame

        inner.run = watched  # type: ignore[method-assign]

        async def ask(number: int, asked: dict[str, Any]) -> str:
            await asyncio.sleep(asked["arrives"])  # made up
            wanted = submit(number, asked["seconds"], fails=asked["fails"], prompt=asked["prompt"])
            try:
                async with asyncio.timeout(asked["cancelled_after"]):
                    frames = await answer(engine, wanted)
            except (TimeoutError, EngineFailed) as error:
                return type(error).__name__
            return "answered" if frames[-1].usage is not None else "cut off"

        async def changes() -> None:
            if change is not None:
                await asyncio.sleep(change[0])  # made up
                engine.set_policy(change[1])

        async def death() -> None:
            if dies_at is not None:
                await asyncio.sleep(dies_at)  # made up
                inner.die()
                engine.fail()  # as the replica that notices it

        tasks = [asyncio.create_task(ask(number, asked)) for number, asked in enumerate(requests)]
        beside = [asyncio.create_task(changes()), asyncio.create_task(death())]
        await asyncio.sleep(9.0)  # made up: after all arrivals
        engine.close()
        ends = await asyncio.gather(*tasks)
        await asyncio.gather(*beside)
        allowed = {"answered", "TimeoutError", "EngineFailed", "EngineUnreachable"}
        assert set(ends) <= allowed
        for asked, end in zip(requests, ends, strict=True):
            if dies_at is None and asked["cancelled_after"] is None:
                assert end == ("EngineFailed" if asked["fails"] else "answered")
        assert now() <= 9.0 + sum(asked["seconds"] for asked in requests) + 12.0

    run(policy, scenario)
