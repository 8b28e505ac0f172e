"""What an agent session is worth under load: `python -m benchmarks.sessions [--quick]`.

On the real engine: how long does a request wait for its first token while the line is full, of a session, and an
ordinary one beside it?
Prints conditions, progress and a table, and as its last line one JSON object.

Invariant: any request that fails ends the run with exit code 1 and no figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import conditions
from benchmarks.common.arms import HOST, OURS, Arm, BenchmarkError, ModelChoice, start
from benchmarks.common.output import write_json
from benchmarks.common.run import CONSOLE_WIDTH
from benchmarks.common.stage import run_folder
from serve_app.engine import ensure_tiny_model

SLOTS = 8  # of the engine's line: few, so that a line is full without a machine full of clients
KV_CACHE_BYTES = 2**27  # a hundred prompts of the load
CLIENTS = 4 * SLOTS  # closed loop: a quarter runs, the rest waits
LOAD_PROMPT_TOKENS = 200
LOAD_TOKENS = 64
SESSION_KV_TOKENS = 2048
TOKEN_IDS = (16, 240)  # of plain bytes in the built-in model's vocabulary
OPENINGS = 400
QUICK_OPENINGS = 100
SETTLE_S = 2.0  # for the line to fill before anything is measured
REQUEST_S = 120.0  # no request here takes a tenth of it


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    probes: int
    clients: int = CLIENTS
    seed: int = 1


def plan_of(arguments: Sequence[str]) -> Plan:
    """The command line; exits with code 2 and a message when it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions", description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer probes")
    parser.add_argument("--seed", type=int, default=1, help="of prompts")
    given = parser.parse_args(arguments)
    return Plan(QUICK_OPENINGS if given.quick else OPENINGS, seed=given.seed)


class Caller:
    """Requests to the stack under measurement, each with a prompt of its own."""

    def __init__(self, arm: Arm, model: str, seed: int) -> None:
        self._model = model
        self._rng = np.random.default_rng(seed)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=f"http://{HOST}:{arm.port}/v1",
            headers={"Authorization": f"Bearer {arm.api_key}"},
            timeout=REQUEST_S,
            limits=limits,
        )

    def prompt(self, tokens: int) -> list[int]:
        """Token ids; no other prompt begins with these."""
        return [int(number) for number in self._rng.integers(*TOKEN_IDS, tokens)]

    async def first_token_s(self, prompt: list[int], tokens: int, session: str | None = None) -> float:
        """Seconds to the first bytes of a streamed answer, which is read to its end."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        began = time.monotonic()
        first = 0.0
        async with self._http.stream("POST", "/completions", json=body, headers=_of(session)) as answer:
            if answer.status_code != 200:
                raise BenchmarkError(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
            async for _ in answer.aiter_bytes():
                first = first or time.monotonic() - began
        return first

    @contextlib.asynccontextmanager
    async def session(self, name: str) -> AsyncIterator[str]:
        """An open session, for the block."""
        body = {"model": self._model, "session_id": name, "kv_tokens": SESSION_KV_TOKENS}
        answer = await self._http.post("/sessions", json=body)
        if answer.status_code != 201:
            raise BenchmarkError(f"no session: {answer.status_code}: {answer.text[:300]}")
        try:
            yield name
        finally:
            await self._http.delete(f"/sessions/{name}")

    @contextlib.asynccontextmanager
    async def load(self, clients: int) -> AsyncIterator[None]:
        """Clients that ask without a pause, for the block; one whose request fails ends it."""

        async def ask() -> None:
            while True:
                await self.first_token_s(self.prompt(LOAD_PROMPT_TOKENS), LOAD_TOKENS)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask()) for _ in range(clients)]
            await asyncio.sleep(SETTLE_S)
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def close(self) -> None:
        await self._http.aclose()


def _of(session: str | None) -> dict[str, str]:
    return {} if session is None else {"X-Session-Id": session}


async def waits(caller: Caller, plan: Plan) -> dict[str, list[float]]:
    """Seconds to the first token of short requests, in turn of a session and ordinary ones, in front of a full line;
    and of either with nothing else to do."""
    found: dict[str, list[float]] = {"idle": [], "session": [], "ordinary": []}
    async with caller.session("waits") as session:
        for _ in range(plan.probes):
            found["idle"].append(await caller.first_token_s(caller.prompt(8), 1, session))
        async with caller.load(plan.clients):
            for number in range(plan.probes):
                found["session"].append(await caller.first_token_s(caller.prompt(8), 1, session))
                if number % 8 == 0:  # each waits for the whole line
                    found["ordinary"].append(await caller.first_token_s(caller.prompt(8), 1))
    return found


async def measure(arm: Arm, model: ModelChoice, plan: Plan) -> dict[str, Any]:
    """Milliseconds to the first token. Raises BenchmarkError: a request failed."""
    caller = Caller(arm, model.name, plan.seed)
    try:
        await caller.first_token_s(caller.prompt(8), 1)
        found = await waits(caller, plan)
    except* (BenchmarkError, httpx.HTTPError) as errors:
        raise BenchmarkError(str(errors.exceptions[0])) from None
    finally:
        await caller.close()
    return {"first_token_ms": {name: summary(values) for name, values in found.items()}}


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    p50, p99 = np.quantile(np.asarray(seconds) * 1e3, (0.5, 0.99))
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "requests": len(seconds)}


def print_table(console: Console, result: dict[str, Any]) -> None:
    times = Table("request", "p50", "p99", "requests", title="ms to the first token of a short request")
    for name, figures in result["first_token_ms"].items():
        label = {"idle": "session, nothing else", "session": "session, line full", "ordinary": "ordinary, line full"}
        times.add_row(label[name], f"{figures['p50']:.1f}", f"{figures['p99']:.1f}", str(figures["requests"]))
    console.print(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when figures were got, whatever they are; 1 when they could not be."""
    plan = plan_of(sys.argv[1:] if arguments is None else arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else CONSOLE_WIDTH)
    model = ModelChoice(path=str(ensure_tiny_model()), max_num_seqs=SLOTS, kv_cache_bytes=KV_CACHE_BYTES)
    facts = conditions.collect(model, asdict(plan), [])
    console.print_json(json.dumps(facts))
    with run_folder(console) as folder, ExitStack() as ending:
        arm = start(OURS, model, folder)
        ending.callback(arm.stop)
        console.print(f"  up after {arm.start_s:.0f} s on port {arm.port}")
        result = asyncio.run(measure(arm, model, plan))
    print_table(console, result)
    write_json({"sessions": result, "conditions": facts})
    return 0


if __name__ == "__main__":
    sys.exit(main())
