"""Whatever ends a run, its client gets an answer, and its slot is free again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.errors import Unavailable
from serve_app.http import engine_calls
from serve_app.transport import Frame, Submit, TokenUsage
from serve_app.types import Outcome
from tests.fakes.asgi_client import ask, started
from tests.fakes.engines import FakeCluster, model, run


class Panic(BaseException):
    """As pydantic's: raised by native code, and no `Exception`."""


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("end", [Panic("native code"), None], ids=["panic", "no last frame"])
def test_a_run_that_ends_without_an_answer_is_answered_and_frees_its_slot(
    end: Panic | None, stream: bool, keyed: bool
) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2")
        tries: list[str] = []
        whole = {name: cluster[name].engine.server.run for name in ("r1", "r2")}

        async def broken(submit: Submit, put: Callable[[Frame], None]) -> None:
            tries.append(submit.request_id)
            if end is not None:
                raise end

        for name in whole:
            cluster[name].engine.server.run = broken
        asked = (client.post(ask(f"p {n}", stream=stream), headers=_key(keyed, n)) for n in range(4))
        replies = await asyncio.gather(*asked)
        assert {(reply.status, reply.error["code"]) for reply in replies} == {(500, "request_failed")}
        assert {reply.headers["x-should-retry"] for reply in replies} == {"false"}, "so would a repeat end"
        assert client.outcomes == {Outcome.ENGINE_FAILED: 4}
        assert len(tries) == len(set(tries)) == 4, "one attempt each"
        assert not any(client.model.replica_set.ejections.values())
        assert client.at_rest()
        for name, run_whole in whole.items():
            cluster[name].engine.server.run = run_whole
        assert (await client.post(ask("p"))).status == 200
        assert client.at_rest()

    run(scenario, model(slots=1))


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_a_refusal_that_a_repeat_may_not_meet_tells_when(keyed: bool) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        whole = cluster["r1"].engine.server.run

        async def restarting(submit: Submit, put: Callable[[Frame], None]) -> None:
            body = json.dumps(Unavailable("restarting").body()).encode()
            put(Frame(submit.number, body, 503, "json", usage=TokenUsage(), retry_after_s=5.0))

        cluster["r1"].engine.server.run = restarting
        reply = await client.post(ask("p"), headers=_key(keyed, 0))
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, Unavailable.code, "5")
        assert "x-should-retry" not in reply.headers
        cluster["r1"].engine.server.run = whole
        assert (await client.post(ask("p"), headers=_key(keyed, 0))).status == 200
        assert client.at_rest()

    run(scenario, model(slots=1))


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_a_panic_inside_the_router_is_answered_and_recorded(keyed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: Any, **__: Any) -> None:
        raise Panic("native code")

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        monkeypatch.setattr(engine_calls, "Arrival", panic)
        reply = await client.post(ask("p"), headers=_key(keyed, 1))
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
        assert client.outcomes == {Outcome.INTERNAL_ERROR: 1}
        assert client.at_rest()

    run(scenario)


def _key(keyed: bool, number: int) -> dict[str, str]:
    return {"idempotency-key": f"{number}"} if keyed else {}
