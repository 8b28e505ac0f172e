"""An engine alone under large requests.

One tenant sends twenty of a kind at once; another one's trivial requests come beside them. What fits the model is
answered as ever.
"""

from __future__ import annotations

import asyncio
import gc
import random
import selectors
import time
from typing import Any

from serve_app.settings.settings import BUILT_IN_MODEL
from serve_app.transport import EngineBackend, Submit
from serve_app.types import Operation

AT_ONCE = 20
TRIVIALS = 5
ITEM = {"role": "user", "content": "a"}
TRIVIAL: dict[str, Any] = {"messages": [{"role": "user", "content": "Say."}], "max_tokens": 8}
# Each takes the process that reads them a quarter of a second of CPU or more.
ATTACKS: dict[str, tuple[Operation, dict[str, Any]]] = {
    "responses": (Operation.RESPONSES, {"input": [ITEM] * 5_000}),
    "chat": (Operation.CHAT, {"messages": [ITEM] * 20_000}),
    "tokenize": (Operation.TOKENIZE, {"prompt": "word " * 100_000}),
    "input_tokens": (Operation.INPUT_TOKENS, {"input": [ITEM] * 5_000}),
}
FITS: dict[str, tuple[Operation, dict[str, Any]]] = {
    "chat": (Operation.CHAT, {"messages": [ITEM] * 600, "max_tokens": 5}),
    "stream": (Operation.CHAT, {"messages": [ITEM] * 600, "max_tokens": 5, "stream": True}),
    "responses": (Operation.RESPONSES, {"input": [ITEM] * 600, "max_output_tokens": 5}),
    "responses_stream": (Operation.RESPONSES, {"input": [ITEM] * 600, "max_output_tokens": 5, "stream": True}),
    "tokenize": (Operation.TOKENIZE, {"messages": [ITEM] * 600}),
    "input_tokens": (Operation.INPUT_TOKENS, {"input": [ITEM] * 600}),
}


class TurnMeter(selectors.DefaultSelector):
    """Notes the longest turn of an event loop, in CPU seconds of its thread: from one wait for events to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        self._began_s = time.thread_time()

    def select(self, timeout: float | None = None) -> Any:
        self.longest_s = max(self.longest_s, time.thread_time() - self._began_s)
        found = super().select(timeout)
        self._began_s = time.thread_time()
        return found

    def take(self) -> float:
        """The longest turn since the last call, in ms."""
        longest_s, self.longest_s = self.longest_s, 0.0
        return round(1000 * longest_s, 1)


async def ask(backend: EngineBackend, tenant: str, operation: Operation, body: dict[str, Any]) -> dict[str, Any]:
    submit = Submit(1, f"r{random.random()}", operation, {"model": BUILT_IN_MODEL.name, **body}, cache_salt=tenant)
    began = time.monotonic()
    answer = b""
    status = 0
    async for piece in backend.run(submit):
        status = status or piece.status
        answer += piece.body
    return {"status": status, "seconds": time.monotonic() - began, "answer": answer.decode()}


async def seen(backend: EngineBackend, meter: TurnMeter) -> dict[str, Any]:
    """What becomes of them. `meter`: of the running loop."""
    for operation in (Operation.CHAT, Operation.CHAT, Operation.RESPONSES):  # imports, caches
        body = TRIVIAL if operation is Operation.CHAT else {"input": "Say.", "max_output_tokens": 8}
        await ask(backend, "other", operation, body)
    fits = {name: await ask(backend, "other", *one) for name, one in FITS.items()}
    gc.collect()
    gc.freeze()  # as an engine replica does once it is up
    await asyncio.sleep(0)  # the collection is a turn of its own
    under: dict[str, Any] = {}
    for name, (operation, body) in ATTACKS.items():
        meter.take()
        attack = [asyncio.create_task(ask(backend, "attacker", operation, body)) for _ in range(AT_ONCE)]
        trivial = [await ask(backend, "other", Operation.CHAT, TRIVIAL) for _ in range(TRIVIALS)]
        ended = await asyncio.gather(*attack)
        under[name] = {
            "longest_turn_ms": meter.take(),
            "trivial": [one["status"] for one in trivial],
            "trivial_s": round(max(one["seconds"] for one in trivial), 3),
            "attack": sorted({one["status"] for one in ended}),
            "attack_s": round(max(one["seconds"] for one in ended), 3),
            "answer": ended[0]["answer"][:200],
        }
    return {"fits": fits, "under": under}
