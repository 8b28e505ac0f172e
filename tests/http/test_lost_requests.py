"""A request at which the quota actor fails is told so, and its receipt says so; all others are served."""

from __future__ import annotations

import asyncio
from typing import Any

from serve_app.core.queue import Arrival
from serve_app.types import Outcome
from tests.fakes.asgi_client import ask, started
from tests.fakes.engines import FakeCluster, model, run


def test_a_request_at_which_the_actor_fails_is_a_503_of_its_own_and_the_others_are_answered() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        requests: Any = cluster.quota.core.queue.requests
        arrive = requests.arrive
        failed = []

        def fails(router: str, name: str, arrival: Arrival, *rest: Any) -> None:
            if not failed:
                failed.append(arrival.request_id)
                raise KeyError("batch")
            arrive(router, name, arrival, *rest)

        requests.arrive = fails
        replies = await asyncio.gather(*(client.post(ask(f"p {n}", 20, stream=False)) for n in range(12)))
        assert len(failed) == 1
        (lost,) = (reply for reply in replies if reply.status != 200)
        assert (lost.status, lost.error["code"], lost.headers["retry-after"]) == (503, "request_lost", "1")
        assert client.outcomes == {Outcome.OK: 11, Outcome.REFUSED: 1}
        receipt = client.edge.parts.receipts.kept[lost.headers["x-serve-app-request-id"]]
        assert (receipt.outcome, receipt.refused) == (Outcome.REFUSED, "request_lost")
        assert client.at_rest()

    run(scenario, model(slots=1))
