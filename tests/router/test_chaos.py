"""Two routers, a handful of replicas, hundreds of requests; clients leave and replicas die: nothing is lost or left.

The seed fixes what is done; how it falls together in time differs from run to run, and must not matter.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from serve_app.core.routing import outliers
from serve_app.router import replicas as replica_module
from serve_app.transport import channel, tcp_server
from serve_app.types import Outcome
from tests.effort import effort
from tests.fakes import engines
from tests.fakes.asgi_client import Client, Reply, ask
from tests.fakes.claims import FakeClaims
from tests.fakes.engines import POLL_S, SETTLE_S, TURNS, FakeCluster, model, until
from tests.fakes.router import expected_text

REQUESTS = 240
REPLICAS = 4
SLOTS = 5  # per replica, not even, so that shares differ
MAX_TOKENS = 40
ARRIVAL_S = 0.006  # mean time between requests; the replicas end about as many when all of them run
STRIKE_S = 0.04  # mean time between two things that go wrong


@dataclass
class Asked:
    """A request of the chaos, and what its client got."""

    client: Client
    prompt: str
    tokens: int
    reply: Reply
    task: asyncio.Task[Reply]
    keyed: bool = False

    @property
    def outlived_by_its_run(self) -> bool:
        """Whether its run went on without it, to whatever end."""
        return self.keyed and self.task.cancelled()


class Chaos:
    """What goes wrong, drawn from a seed."""

    def __init__(self, cluster: FakeCluster, seed: int) -> None:
        self._cluster = cluster
        self._random = random.Random(seed)
        self._started = 0
        self.struck: Counter[str] = Counter()
        self.requests: list[Asked] = []
        self._leaving: list[asyncio.Task[None]] = []

    async def add(self) -> None:
        self._started += 1
        await self._cluster.add(f"r{self._started}")

    async def fill(self) -> None:
        """Bring the running set to its size with new replicas, as Serve's controller does."""
        for name in self._cluster.running:
            if self._cluster[name].dead or self._cluster[name].mute:
                self._cluster[name].mute = False
                self._cluster.remove(name)
        while len(self._cluster.running) < REPLICAS:
            await self.add()

    async def strike(self) -> None:
        """One thing goes wrong, or is put right."""
        kind = self._random.choice(["kill", "kill_untold", "break", "calls", "remove", "mute", "back", "fill", "fill"])
        name = self._random.choice(sorted(self._cluster.running) or [""])
        self.struck[kind] += 1
        if kind == "fill" or not name:
            await self.fill()
        elif kind == "back":
            gone = [replica for replica in self._cluster.replicas.values() if not replica.dead]
            await self._cluster.add(self._random.choice(gone).name if gone else name)
        elif kind == "mute":
            self._cluster[name].mute = True
        elif kind == "break":
            self._cluster.break_channels(name)
        elif kind == "calls":
            self._cluster[name].fail_calls("hold")
        elif kind == "remove":
            self._cluster.remove(name)
        else:
            self._cluster.kill(name, reported=kind == "kill")

    def ask(self, client: Client) -> None:
        """A request of some kind, whose client may leave, read slowly, or repeat itself."""
        draw = self._random
        number = len(self.requests)
        repeats = number - 1 if number and draw.random() < 0.2 else number
        prompt = f"p {repeats}"
        tokens = 1 + repeats % MAX_TOKENS
        headers = {"Idempotency-Key": f"key-{repeats}"} if repeats % 2 else {}
        if draw.random() < 0.1:
            headers["X-Deadline-Ms"] = str(draw.randint(1, 200))
        body = ask(prompt, tokens, stream=bool(repeats % 3), priority=draw.choice(["low", "normal", "high"]))
        pause_s = draw.uniform(0.0, 0.03) if draw.random() < 0.2 else 0.0

        async def reading(reply: Reply) -> None:
            if pause_s:
                await asyncio.sleep(pause_s)  # a client that reads slowly; drawn, at most the plan's

        reply = Reply()
        task = client.posting(body, headers=headers, reply=reply, reading=reading)
        self.requests.append(Asked(client, prompt, tokens, reply, task, "Idempotency-Key" in headers))
        if draw.random() < 0.25:
            self._leaving.append(asyncio.create_task(self._leave(task, draw.expovariate(1 / 0.03))))

    async def _leave(self, task: asyncio.Task[Reply], after_s: float) -> None:
        await asyncio.sleep(after_s)  # a client that leaves; drawn, 30 ms in the mean
        task.cancel()

    async def end(self) -> None:
        await self.fill()
        await asyncio.wait([asked.task for asked in self.requests])
        await asyncio.gather(*self._leaving)


def judge(asked: Asked) -> Outcome:
    """The outcome that the client saw; AssertionError if what it got is none."""
    reply = asked.reply
    whole = expected_text(asked.prompt, asked.tokens)
    left = asked.task.cancelled()
    if not left:
        error = asked.task.exception()
        assert error is None, repr(error)
        assert reply.ended
    if reply.status == 502:
        return Outcome.ENGINE_FAILED
    if reply.status in (429, 503):
        assert int(reply.headers["retry-after"]) >= 0
        return Outcome.REFUSED
    if reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.body.count(b"data: [DONE]") == int(reply.ended)
        assert whole.startswith(reply.text)
        failed = [event for event in reply.events if "error" in event]
        if failed:
            assert failed == reply.events[-1:]
            return Outcome.ENGINE_FAILED
    if left:  # it may not have got anything, or got everything and been away before it was counted
        assert reply.status in (0, 200)
        return Outcome.CANCELLED_RUNNING
    assert reply.status == 200, reply.body
    assert reply.text == whole
    return Outcome.OK


def count(client: Client, requests: list[Asked]) -> Counter[str]:
    """What the clients of one router saw, as its metrics should have it; all that left counted as one."""
    return Counter(judge(asked).value for asked in requests if asked.client is client)


@pytest.mark.parametrize("seed", range(1, effort(1, 4) + 1))
def test_every_request_ends_once_and_nothing_is_left_whatever_dies(seed: int) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        chaos = Chaos(cluster, seed)
        draw = random.Random(-seed)
        await chaos.fill()
        options = {"admission": {"max_queued": 40}}
        claims = FakeClaims()
        names = ["router 0", "router 1"]
        clients = [await Client(cluster, name, 2, keyed_runs=claims.join(name), **options).start() for name in names]
        for client in clients:
            client.handle.turns = lambda method: draw.randint(0, 3 * TURNS)
        strike_in_s = 0.0
        for _ in range(REQUESTS):
            chaos.ask(draw.choice(clients))
            pause_s = draw.expovariate(1 / ARRIVAL_S)
            await asyncio.sleep(pause_s)  # the load: Poisson arrivals
            strike_in_s -= pause_s
            if strike_in_s < 0:
                await chaos.strike()
                strike_in_s = draw.expovariate(1 / STRIKE_S)
        await chaos.end()
        for client in clients:
            asked = sum(one.client is client for one in chaos.requests)
            await until(lambda: sum(client.outcomes.values()) == asked, SETTLE_S, "all ended")  # noqa: B023
            counted = Counter(client.outcomes)
            left = counted.pop(Outcome.CANCELLED_QUEUED, 0) + counted.pop(Outcome.CANCELLED_RUNNING, 0)
            counted[Outcome.CANCELLED_RUNNING] = left
            certain = count(client, [one for one in chaos.requests if not one.outlived_by_its_run])
            assert certain <= counted
            assert sum(counted.values()) == asked
            assert client.at_rest()
            channels = client.model.replica_set.channels.values()
            assert not any(link.requests for link in channels)
            await until(lambda: not any(link.connection for link in channels), SETTLE_S, "channels closed")  # noqa: B023
        seen = count(clients[0], chaos.requests) + count(clients[1], chaos.requests)
        assert seen[Outcome.OK] > REQUESTS / 3, (seen, chaos.struck)  # chaos, and yet most are served

    short = {
        (channel, "CHANNEL_ATTACH_S"): 0.1,
        (outliers, "FIRST_EJECTION_S"): 0.05,
        (replica_module, "ANSWER_TIMEOUT_S"): 10 * POLL_S,
    }
    short[tcp_server, "TICKET_LIFE_S"] = 0.5
    engines.run(scenario, model(slots=SLOTS), waits=short)
