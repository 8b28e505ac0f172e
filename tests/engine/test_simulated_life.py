"""The simulated engine under a crowd: batches, aborts, health, start and end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.simulated import SimulatedEngine
from serve_app.errors import ConfigError, EngineFailed
from serve_app.transport import EngineInfo, Frame, TokenUsage
from serve_app.types import Operation
from tests.effort import examples
from tests.engine.simulated_engine import HELLO, MadeUpTime, pieces, run, submit


@settings(max_examples=examples(30), deadline=None)
@given(
    slots=st.integers(1, 6),
    kv=st.integers(90, 200),
    rate=st.floats(10.0, 1e6),
    priorities=st.lists(st.integers(0, 2), min_size=1, max_size=8),
)
def test_text_does_not_depend_on_the_batch_it_is_made_in(
    slots: int, kv: int, rate: float, priorities: list[int]
) -> None:
    def body(number: int) -> dict[str, Any]:
        return {"prompt": f"prompt {number} " * (1 + number), "max_tokens": 10 * (1 + number % 4), "stream": True}

    async def together(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> list[tuple[bytes, list[int]]]:
        async def ask(number: int, priority: int) -> tuple[bytes, list[int]]:
            asked = submit(Operation.COMPLETION, body(number), number, priority)
            reported = [piece async for piece in engine.run(asked)]
            return b"".join(piece.body for piece in reported), [
                t for p in reported for group in p.groups for t in group[1:]
            ]

        received = await asyncio.gather(*[ask(number, priority) for number, priority in enumerate(priorities)])
        assert (engine.load().running, engine.load().waiting, engine.load().kv_cache_usage) == (0, 0, 0.0)
        return received

    crowded = run(together, max_num_seqs=slots, simulated={"kv_cache_tokens": kv, "prefill_tokens_per_s": rate})
    assert crowded == run(together, max_num_seqs=64)


def test_closing_the_iterator_frees_slot_and_kv_at_once() -> None:
    async def close(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> None:
        running = engine.run(submit(Operation.CHAT, HELLO | {"stream": True}, 1))
        assert (await anext(running)).status == 200
        queued = asyncio.create_task(anext(engine.run(submit(Operation.CHAT, HELLO, 2))))
        await asyncio.sleep(0)
        assert (engine.load().running, engine.load().waiting) == (1, 1)
        queued.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await queued
        assert (engine.load().running, engine.load().waiting) == (1, 0)
        await running.aclose()
        assert (engine.load().running, engine.load().kv_cache_usage) == (0, 0.0)

    run(close, max_num_seqs=1)


def test_a_slow_consumer_gets_every_token_though_steps_end_while_it_is_away() -> None:
    body = HELLO | {"max_tokens": 20, "stream": True}

    async def slow(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> list[Frame]:
        reported = []
        async for piece in engine.run(submit(Operation.CHAT, body)):
            reported.append(piece)
            for _ in range(30):  # turns of the loop: several steps
                await asyncio.sleep(0)
        return reported

    behind = run(slow)
    assert len(behind) < 10
    prompt = pieces(Operation.CHAT, body)
    assert b"".join(piece.body for piece in behind) == b"".join(piece.body for piece in prompt)


def test_a_frozen_engine_is_unhealthy_once_a_step_is_overdue() -> None:
    async def freeze(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> None:
        time.flows.clear()
        time.now += 1000.0
        await engine.check_health()  # nothing to do is no fault
        answer = asyncio.create_task(anext(engine.run(submit(Operation.CHAT, HELLO | {"max_tokens": 3}))))
        await asyncio.sleep(0)
        time.now += 29.0
        await engine.check_health()
        time.now += 2.0
        with pytest.raises(EngineFailed, match="frozen"):
            await engine.check_health()
        time.flows.set()
        assert (await answer).status == 200
        await engine.check_health()

    run(freeze, health_stall_s=30.0)


def test_a_step_longer_than_the_stall_bound_is_healthy_until_its_end() -> None:
    async def slow(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> None:
        time.flows.clear()
        answer = asyncio.create_task(anext(engine.run(submit(Operation.CHAT, HELLO))))
        for _ in range(10):  # turns of the loop, until the step has begun
            await asyncio.sleep(0)
        assert engine.load().running == 1
        time.now += 100.9
        await engine.check_health()
        time.now += 0.2
        with pytest.raises(EngineFailed, match="frozen"):
            await engine.check_health()
        answer.cancel()

    run(slow, health_stall_s=1.0, simulated={"decode_step_s": 100.0, "prefill_tokens_per_s": 1e9})


def test_shutdown_fails_what_still_runs_and_every_later_call() -> None:
    async def stop(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> None:
        time.flows.clear()
        answer = asyncio.create_task(anext(engine.run(submit(Operation.CHAT, HELLO))))
        await asyncio.sleep(0)
        await engine.shutdown()
        with pytest.raises(EngineFailed, match="shut down"):
            await answer
        with pytest.raises(EngineFailed, match="does not run"):
            await anext(engine.run(submit(Operation.CHAT, HELLO)))
        with pytest.raises(EngineFailed, match="does not run"):
            await engine.check_health()

    run(stop)


def test_start_tells_the_sizes_and_refuses_a_length_the_cache_cannot_hold() -> None:
    async def reported(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> EngineInfo:
        return info

    info = run(reported, max_num_seqs=7, simulated={"kv_cache_tokens": 4096})
    assert (info.model, info.tasks, info.max_model_len, info.slots, info.kv_cache_tokens) == (
        "sim",
        ["generate"],
        4096,
        7,
        4096,
    )
    with pytest.raises(ConfigError, match="max_model_len"):
        run(reported, max_model_len=5000, simulated={"kv_cache_tokens": 4096})


def test_load_counts_what_was_done() -> None:
    async def load(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> None:
        async for _ in engine.run(submit(Operation.CHAT, HELLO | {"max_tokens": 6})):
            pass
        load = engine.load()
        assert (load.steps, load.generated_tokens, load.prompt_tokens, load.preemptions) == (6, 6, 3, 0)

    run(load)


def test_thousands_of_requests_at_once_all_end() -> None:
    async def crowd(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> None:
        async def ask(number: int) -> TokenUsage | None:
            asked = submit(Operation.CHAT, HELLO | {"max_tokens": 8, "stream": True}, number)
            reported = [piece async for piece in engine.run(asked)]
            assert engine.load().running <= 256
            return reported[-1].usage

        assert await asyncio.gather(*[ask(number) for number in range(3000)]) == [TokenUsage(3, 8, 0, "length")] * 3000
        assert engine.load().steps == 8 * -(-3000 // 256)  # full batches all the way
        assert time.now == pytest.approx(engine.load().steps * 0.02 + 3000 * 2 / 20_000, rel=0.01)

    run(crowd, max_num_seqs=256, session_slots=0)
