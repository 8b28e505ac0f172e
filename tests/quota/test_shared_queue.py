"""Routers and their line in the quota actor, over its calls `exchange` and `watch`. Ray and its store are fakes.

Time is real: waits are bounded by `SOON_S`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from serve_app.core.memory import NodeProcesses
from serve_app.core.queue import Arrival, Grant
from serve_app.core.queue.admission import QueuePolicy
from serve_app.core.shared_queue import RouterQueue
from serve_app.quota import actor as quotas
from serve_app.quota.actor import GpuMemoryQuota
from serve_app.types import RequestClass
from tests.quota.actor_world import ENGINE, SOON_S, TOKENS, World, with_actor

SLOTS = 2


class Router:
    """A router's line and its two calls."""

    def __init__(self, actor: GpuMemoryQuota, name: str, process: NodeProcesses | None = None) -> None:
        self.actor, self.queue = actor, RouterQueue(name, process=process)
        self.granted: list[str] = []
        self.news = asyncio.Event()
        self.queue.serve("m", QueuePolicy(max_queued=10, max_wait_s=10.0))
        self.queue.set_reachability("m", "e", True, time.monotonic())

    async def say(self) -> None:
        sent_at = time.monotonic()
        reported = self.queue.next_message(sent_at, beat=True)
        assert reported is not None
        self.hear(self.queue.on_reply(await self.actor.exchange(reported), sent_at, time.monotonic()))

    async def watch(self) -> None:
        while True:
            sent_at = time.monotonic()
            reply = await self.actor.watch(self.queue.router_session.watch_message())
            self.hear(self.queue.on_reply(reply, sent_at, time.monotonic()))
            if self.queue.next_message(time.monotonic()) is not None:
                self.queue.on_lost(time.monotonic())  # said with the next word
                await self.say()

    def arrive(self, name: str, level: RequestClass) -> None:
        self.hear(self.queue.on_arrive("m", Arrival(name, level, "t", 1, 10), time.monotonic()))

    def hear(self, actions: list) -> None:  # type: ignore[type-arg]
        self.granted += [action.request_id for action in actions if isinstance(action, Grant)]
        self.news.set()

    async def until(self, *names: str) -> None:
        while not set(names) <= set(self.granted):
            self.news.clear()
            await self.news.wait()


async def serving(actor: GpuMemoryQuota) -> None:
    reply = await actor.engine(replace(ENGINE, slots=SLOTS))
    await actor.engine(replace(ENGINE, slots=SLOTS, holds=reply.holds, kv_tokens=TOKENS, kv_bytes=100))


def test_routers_wait_in_one_line_and_hear_of_their_turn_over_the_watch(world: World) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        await serving(actor)
        first = Router(actor, "r1")
        second = Router(actor, "r2")
        for router in (first, second, first, second):
            await router.say()
        watches = [asyncio.create_task(router.watch()) for router in (first, second)]
        for name in ("a", "b"):
            first.arrive(name, RequestClass.LOW)
            await first.say()
        await first.until("a", "b")
        first.arrive("low", RequestClass.LOW)
        await first.say()
        second.arrive("high", RequestClass.HIGH)
        await second.say()
        assert "high" not in second.granted
        first.queue.on_done("a", time.monotonic(), 5, 5)
        await first.say()
        await second.until("high")
        assert "low" not in first.granted
        second.queue.on_done("high", time.monotonic(), 5, 5)
        await second.say()
        await first.until("low")
        for watch in watches:
            watch.cancel()

    with_actor(scenario)


def test_a_watch_call_is_answered_half_a_second_after_the_last_message_of_its_router_and_not_put_off_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here after 0.2 s, with 0.4 s between two heartbeats."""
    monkeypatch.setattr(quotas, "ROUTER_HEARTBEAT_S", 0.4)

    async def watched_s(router: Router, *reported_after_s: float) -> float:
        began = time.monotonic()
        watch = asyncio.create_task(router.actor.watch(router.queue.router_session.watch_message()))
        for after_s in reported_after_s:
            done, _ = await asyncio.wait({watch}, timeout=max(0.0, began + after_s - time.monotonic()))
            if done:
                break
            await router.say()
        router.hear(router.queue.on_reply(await watch, began, time.monotonic()))
        return time.monotonic() - began

    async def scenario(actor: GpuMemoryQuota) -> None:
        await serving(actor)
        router = Router(actor, "r1")
        for _ in range(3):
            await router.say()
        assert await watched_s(router) > 0.19
        assert await watched_s(router, 0.1) > 0.29
        assert 0.59 < await watched_s(router, *(0.05 * number for number in range(1, 160))) < SOON_S / 2

    with_actor(scenario)


def test_who_waits_too_long_is_refused_when_that_is_due_and_not_at_the_next_tick(world: World) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        await serving(actor)
        router = Router(actor, "r1")
        router.queue.serve("m", QueuePolicy(max_queued=10, max_wait_s=0.05))
        for _ in range(3):
            await router.say()
        for name in ("a", "b", "c"):
            router.arrive(name, RequestClass.LOW)
        await router.say()
        assert actor.queue_timer is not None
        while router.queue.pending.count("m"):
            reply = await actor.watch(router.queue.router_session.watch_message())
            router.hear(router.queue.on_reply(reply, time.monotonic(), time.monotonic()))
        assert router.granted == ["a", "b"]

    with_actor(scenario)


def test_the_slots_of_a_router_whose_process_is_gone_are_granted_to_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.core.quota.OWNER_TTL_S", 1000.0)  # by its silence it lives

    async def scenario(actor: GpuMemoryQuota) -> None:
        await serving(actor)
        dead = Router(actor, "dead", ("n", ((9, 1),)))
        lives = Router(actor, "lives", ("n", ((7, 1),)))
        for router in (dead, lives, dead, lives):
            await router.say()
        for name in ("a", "b"):
            dead.arrive(name, RequestClass.LOW)
        await dead.say()
        await lives.say()
        watches = [asyncio.create_task(router.watch()) for router in (dead, lives)]
        await dead.until("a", "b")
        lives.arrive("next", RequestClass.LOW)
        await lives.say()
        assert lives.granted == []
        watches[0].cancel()
        world.processes.discard(9)
        await lives.until("next")
        watches[1].cancel()

    with_actor(scenario)


def test_the_queue_goes_on_after_the_actors_death(world: World) -> None:
    routers: list[Router] = []

    async def before(actor: GpuMemoryQuota) -> None:
        await serving(actor)
        routers.append(router := Router(actor, "r1"))
        for _ in range(3):
            await router.say()
        for name in ("a", "b", "c"):
            router.arrive(name, RequestClass.LOW)
            await router.say()
        await router.say()
        assert router.granted == ["a", "b"]

    async def after(actor: GpuMemoryQuota) -> None:
        router = routers[0]
        router.actor, router.news = actor, asyncio.Event()
        router.queue.on_lost(time.monotonic())
        reply = await actor.engine(replace(ENGINE, slots=SLOTS))
        await actor.engine(replace(ENGINE, slots=SLOTS, holds=reply.holds, kv_tokens=TOKENS, kv_bytes=100))
        for _ in range(4):
            await router.say()
        router.queue.on_done("a", time.monotonic(), 5, 5)
        while "c" not in router.granted:
            await router.say()
        assert router.granted == ["a", "b", "c"]

    with_actor(before, after)
