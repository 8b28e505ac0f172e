"""What an engine replica does with a stream that another one began."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from serve_app.engine import deployment
from serve_app.errors import EngineFailed
from serve_app.transport import NOT_CONTINUABLE, Frame, Submit
from serve_app.types import Operation

ASKED = Submit(1, "r", Operation.COMPLETION, {"prompt": "a b", "max_tokens": 4, "stream": True}, created=1)


async def replica_of_a_simulated_engine() -> Any:
    replica: Any = object.__new__(deployment.EngineReplica)
    await replica.__init__({"name": "m", "engine": "simulated", "simulated": {"decode_step_s": 0.001}})
    return replica


def answers(*asked: Submit, continues: bool = True) -> list[list[Frame] | EngineFailed]:
    """What the replica says to each, one after the other."""

    async def scenario() -> list[list[Frame] | EngineFailed]:
        replica = await replica_of_a_simulated_engine()
        replica.engine_info = msgspec.structs.replace(replica.engine_info, continues=continues)
        found: list[list[Frame] | EngineFailed] = []
        for submit in asked:
            frames: list[Frame] = []
            try:
                await replica.run(submit, frames.append)
                found.append(frames)
            except EngineFailed as error:
                assert frames == []
                found.append(error)
        replica.watching.cancel()
        await replica.shutdown()
        return found

    return asyncio.run(scenario())


def begun() -> tuple[list[Frame], Submit]:
    """The frames of an undisturbed run, and the request that goes on after the first of them."""
    (frames,) = answers(ASKED)
    assert isinstance(frames, list)
    return frames, msgspec.structs.replace(ASKED, groups=frames[0].groups, events=frames[0].events)


def test_a_stream_continues_where_another_replica_left_it() -> None:
    undisturbed, rest = begun()
    (frames,) = answers(rest)
    assert isinstance(frames, list)
    assert (frames[0].status, frames[0].media) == (200, "sse")
    assert [frame.body for frame in frames] == [frame.body for frame in undisturbed[1:]]


@pytest.mark.parametrize(
    "body",
    [{"prompt": ""}, {"stream": False}, {"max_tokens": 0}],
    ids=["refused", "whole_answer", "refused_length"],
)
def test_nothing_but_a_stream_is_put_where_a_stream_continues(body: dict[str, Any]) -> None:
    _, rest = begun()
    (failed,) = answers(msgspec.structs.replace(rest, body=ASKED.body | body))
    assert isinstance(failed, EngineFailed)
    assert failed.code == NOT_CONTINUABLE


def test_an_engine_that_cannot_continue_says_so_and_answers_first_runs() -> None:
    _, rest = begun()
    failed, frames = answers(rest, ASKED, continues=False)
    assert isinstance(failed, EngineFailed)
    assert failed.code == NOT_CONTINUABLE
    assert isinstance(frames, list)
