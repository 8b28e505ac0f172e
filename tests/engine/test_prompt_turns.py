"""Prompts with log probabilities enter the engine as many at once as fill a step, tenants in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.engine.prompt_turns import PrefillTurns, ScoredPrompt
from tests.requires import requires

STEP = 1000  # tokens


class Engine:
    """Computes the prompts that enter until `finish`; notes who is in, and who has ever been."""

    def __init__(self) -> None:
        self.turns = PrefillTurns(STEP)
        self.inside: list[str] = []
        self.entered: list[str] = []
        self.finished: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def send(self, *names: str, tokens: int = STEP, priority: int = 2) -> None:
        """Requests `tenant1` of the tenant `tenant`."""
        for name in names:
            prompt = ScoredPrompt(name, name.rstrip("0123456789"), priority, tokens)
            self.finished[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._run(prompt))
        await settle()

    async def finish(self, *names: str) -> None:
        for name in names:
            self.finished[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks[name]])
        await settle()

    async def _run(self, prompt: ScoredPrompt) -> None:
        async with self.turns.turn(prompt):
            self.inside.append(prompt.request_id)
            self.entered.append(prompt.request_id)
            try:
                await self.finished[prompt.request_id].wait()
            finally:
                self.inside.remove(prompt.request_id)


async def settle() -> None:
    """Every task has run as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def in_a_loop(scenario: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        asyncio.run(scenario())

    test.__name__ = scenario.__name__
    return test


@in_a_loop
async def test_twenty_large_prompts_enter_one_by_one_and_another_tenants_waits_for_two() -> None:
    engine = Engine()
    await engine.send(*(f"heavy{number}" for number in range(20)), tokens=3 * STEP)
    await engine.send("light0", tokens=10)
    assert engine.inside == ["heavy0"]
    while engine.inside:
        assert len(engine.inside) == 1
        await engine.finish(*engine.inside)
    assert engine.entered[:3] == ["heavy0", "heavy1", "light0"]
    assert len(engine.entered) == 21


@in_a_loop
async def test_small_prompts_enter_together_as_long_as_a_step_takes_them() -> None:
    engine = Engine()
    await engine.send(*(f"a{number}" for number in range(12)), tokens=STEP // 10)
    assert len(engine.inside) == 10
    await engine.finish("a3")
    assert engine.entered[10:] == ["a10"]


@in_a_loop
async def test_a_large_prompt_is_not_overtaken_by_small_ones_for_ever() -> None:
    engine = Engine()
    await engine.send("small0", tokens=STEP // 2)
    await engine.send("large0", tokens=STEP)
    await engine.send("small1", "small2", tokens=STEP // 2)
    assert engine.inside == ["small0"]
    await engine.finish("small0")
    assert engine.inside == ["large0"]
    await engine.finish("large0")
    assert engine.inside == ["small1", "small2"]


@in_a_loop
async def test_a_prompt_of_another_priority_waits_for_no_lower_one_and_holds_none_up() -> None:
    engine = Engine()
    await engine.send("low0", "low1", priority=3)
    await engine.send("critical0", "critical1", priority=0)
    assert engine.inside == ["low0", "critical0"]
    await engine.finish("low0")
    assert engine.inside == ["critical0", "low1"]


@in_a_loop
async def test_a_turn_ends_when_the_prompt_is_computed_however_long_its_answer_is() -> None:
    engine = Engine()
    await engine.send("a0", "a1")
    engine.turns.end("a0")
    await settle()
    assert engine.inside == ["a0", "a1"]
    await engine.send("a2")
    await engine.finish("a0")
    assert engine.inside == ["a1"], "a turn ends once"


@in_a_loop
async def test_a_request_that_is_cancelled_holds_nobody_up_waiting_or_running() -> None:
    engine = Engine()
    await engine.send("a0", "a1", "a2")
    await engine.cancel("a1")
    await engine.cancel("a0")
    assert engine.entered == ["a0", "a2"]
    await engine.finish("a2")
    assert not engine.turns.running
    await engine.send("a3")
    assert engine.inside == ["a3"]


@in_a_loop
async def test_a_large_prompt_that_is_cancelled_lets_those_behind_it_enter() -> None:
    engine = Engine()
    await engine.send("small0", tokens=STEP // 2)
    await engine.send("large0", tokens=STEP)
    await engine.send("small1", tokens=STEP // 2)
    await engine.cancel("large0")
    assert engine.inside == ["small0", "small1"]


class Processor:
    """vLLM's output processor, with the state of each sequence."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def on_added(self, request_id: str, answers: int) -> None:
        for number in range(answers):
            state = SimpleNamespace(external_req_id=request_id, is_prefilling=True)
            self.request_states[f"{request_id} {number}"] = state

    def on_token(self, name: str) -> None:
        self.request_states[name].is_prefilling = False


def test_a_turn_ends_with_the_first_token_of_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    requires("vllm")
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from serve_app.engine.vllm_adapter.recorded import RecordedLLM

    processor = Processor()
    begun = list[str]()
    release = asyncio.Event()

    async def generate(llm: Any, prompt: Any, params: Any, request_id: str, **_: Any) -> Any:
        begun.append(request_id)
        processor.on_added(request_id, params.n)
        await release.wait()
        yield SimpleNamespace(prompt_logprobs=None)

    def no_init(llm: Any) -> None:
        llm.output_processor = processor
        llm.model_config = SimpleNamespace(get_vocab_size=lambda: 2048)

    monkeypatch.setattr(AsyncLLM, "generate", generate)
    monkeypatch.setattr(AsyncLLM, "__init__", no_init)

    async def scenario() -> None:
        llm = RecordedLLM()
        llm.prompt_turns = PrefillTurns(STEP)
        prompt = {"type": "token", "prompt_token_ids": [1] * STEP}

        async def read(request_id: str, params: SamplingParams) -> None:
            async for _ in llm.generate(prompt, params, request_id, priority=2):
                pass

        two = SamplingParams(n=2, prompt_logprobs=5)
        tasks = [asyncio.create_task(read(name, two)) for name in ("first", "second")]
        tasks.append(asyncio.create_task(read("plain", SamplingParams())))
        await settle()
        assert sorted(begun) == ["first", "plain"]
        for token, expected in (("plain 0", 2), ("first 0", 2), ("first 1", 3)):
            processor.on_token(token)
            llm.end_prompt_turns()
            await settle()
            assert len(begun) == expected, token
        release.set()
        await asyncio.gather(*tasks)
        assert not llm.prompt_turns.running

    asyncio.run(scenario())
