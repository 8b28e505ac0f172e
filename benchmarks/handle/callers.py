"""Callers of a running stack in a process of their own: by Python handle, and by the OpenAI SDK over HTTP.

`python -m benchmarks.handle.callers` reads one JSON `CallSpec` from standard input, writes `begin` and `end` to
standard output at the edges of its measuring window and the result as one JSON line last, as
`benchmarks.common.loadgen` does.

Invariant: each of `clients` tasks has exactly one call in flight; a call counts in the window in which it ended; any
answer that is not whole fails the run.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.common.loadgen import own_cpu_s
from benchmarks.common.output import write_json, write_line
from benchmarks.common.workload import prompts

HANDLE = "handle"
SDK = "sdk"
WHOLE = "whole"
STREAMED = "streamed"
CALL_S = 60.0  # of one answer: hundreds of times what it takes, against hanging


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One run. `instance` and `state_dir` say where a handle finds the stack, `host` and `port` where HTTP does."""

    caller: str
    mode: str
    host: str
    port: int
    api_key: str
    model: str
    instance: str
    state_dir: str
    clients: int
    max_tokens: int
    warmup_s: float
    window_s: float
    seed: int


@dataclass(slots=True)
class Answer:
    """What came back. `first_s` is when the first token came, by the clock of `time.perf_counter`; 0 of a whole one."""

    tokens: int
    first_s: float = 0.0


class Caller(Protocol):
    """One client: its calls follow each other."""

    async def call(self, prompt: str) -> Answer:
        """One chat completion, to its end."""
        ...


def asked(spec: CallSpec) -> dict[str, Any]:
    """The sampling of every call: an answer of a fixed length."""
    return {"model": spec.model, "max_tokens": spec.max_tokens, "temperature": 0}


class HandleCaller:
    def __init__(self, spec: CallSpec, llm: Any) -> None:
        self._llm = llm
        self._options = {**asked(spec), "ignore_eos": True}
        self._streamed = spec.mode == STREAMED

    async def call(self, prompt: str) -> Answer:
        messages = [{"role": "user", "content": prompt}]
        if not self._streamed:
            return Answer((await self._llm.chat(messages, **self._options)).usage.completion_tokens)
        options = {**self._options, "stream_options": {"include_usage": True}}
        return await _read(self._llm.stream(messages, **options))


class SdkCaller:
    def __init__(self, spec: CallSpec, client: Any) -> None:
        self._chat = client.chat.completions
        self._options = {**asked(spec), "extra_body": {"ignore_eos": True}}
        self._streamed = spec.mode == STREAMED

    async def call(self, prompt: str) -> Answer:
        options = {**self._options, "messages": [{"role": "user", "content": prompt}]}
        if not self._streamed:
            return Answer((await self._chat.create(**options)).usage.completion_tokens)
        return await _read(await self._chat.create(**options, stream=True, stream_options={"include_usage": True}))


async def _read(stream: Any) -> Answer:
    answer = Answer(0)
    async for chunk in stream:
        if not answer.first_s and chunk.choices and chunk.choices[0].delta.content:
            answer.first_s = time.perf_counter()
        if chunk.usage is not None:
            answer.tokens = chunk.usage.completion_tokens
    return answer


async def callers(spec: CallSpec, stack: AsyncExitStack) -> list[Caller]:
    """The clients of one run, connected; they end with `stack`."""
    if spec.caller == HANDLE:
        from serve_app import connect

        os.environ["SERVE_APP_STATE"] = spec.state_dir
        llm = await stack.enter_async_context(connect(spec.api_key, instance=spec.instance, model=spec.model))
        return [HandleCaller(spec, llm)] * spec.clients
    from openai import AsyncOpenAI

    url = f"http://{spec.host}:{spec.port}/v1"
    client = await stack.enter_async_context(AsyncOpenAI(base_url=url, api_key=spec.api_key, max_retries=0))
    return [SdkCaller(spec, client)] * spec.clients


@dataclass(slots=True)
class Run:
    """What all clients share: the clock of the window and what ended in it."""

    spec: CallSpec
    latency_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0

    async def client(self, caller: Caller, prompt: Callable[[], str]) -> None:
        """Calls until the window has closed."""
        while not self.ended:
            started = time.perf_counter()
            async with asyncio.timeout(CALL_S):
                answer = await caller.call(prompt())
            now = time.perf_counter()
            if answer.tokens != self.spec.max_tokens:
                raise ValueError(f"{answer.tokens} tokens where {self.spec.max_tokens} were asked for")
            if self.began and not self.ended:
                self.latency_ms.append((now - started) * 1e3)
                if answer.first_s:
                    self.ttft_ms.append((answer.first_s - started) * 1e3)

    async def watch(self) -> float:
        """Open and close the window; returns this process's CPU seconds in it."""
        await asyncio.sleep(self.spec.warmup_s)
        write_line("begin")
        cpu_s = own_cpu_s()
        self.began = time.perf_counter()
        await asyncio.sleep(self.spec.window_s)
        self.ended = time.perf_counter()
        cpu_s = own_cpu_s() - cpu_s
        write_line("end")
        return cpu_s


async def drive(spec: CallSpec) -> dict[str, Any]:
    """Run one spec to its end; the first call that fails ends it."""
    run = Run(spec)
    source = prompts(spec.seed)
    async with AsyncExitStack() as stack:
        made = await callers(spec, stack)
        async with asyncio.TaskGroup() as group:
            for caller in made:
                group.create_task(run.client(caller, source.__next__))
            watching = group.create_task(run.watch())
    return {
        "window_s": run.ended - run.began,
        "calls": len(run.latency_ms),
        "latency_ms": run.latency_ms,
        "ttft_ms": run.ttft_ms,
        "cpu_s": watching.result(),
        "errors": 0,
        "error_samples": [],
    }


def main() -> int:
    """0, or 1 when any call failed; the result is written either way."""
    spec = CallSpec(**json.loads(sys.stdin.read()))
    gc.freeze()
    try:
        result = asyncio.run(drive(spec))
    except* Exception as errors:  # noqa: BLE001 - the border of the process: whatever it is goes into the result
        result = {"errors": len(errors.exceptions), "error_samples": [repr(error) for error in errors.exceptions]}
    write_json(result)
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
