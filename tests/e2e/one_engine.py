"""An engine alone, without Ray, in a process of its own: `python -m tests.e2e.one_engine` with an order on its input.

The order is a JSON object: `settings` of one model, `prompts` as token ids, `max_tokens` of each. The prompts are
completed greedily, all at once; the answer, the last line on the output, is a JSON object with `tokens` (the produced
ids) and `info` (what the engine says of itself).
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import msgspec

from serve_app.engine.deployment import make_backend
from serve_app.engine.protocol import EngineBackend, Submit
from serve_app.settings import ModelSettings
from serve_app.types import Operation


async def complete(backend: EngineBackend, model: str, number: int, prompt: list[int], max_tokens: int) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    tokens: list[int] = []
    async for piece in backend.run(Submit(number, f"one-{number}", Operation.COMPLETION, body)):
        if piece.status >= 400:
            raise RuntimeError(piece.body.decode())
        tokens += [token for _, *group in piece.groups for token in group]
    return tokens


async def main(order: dict[str, Any]) -> dict[str, Any]:
    settings = ModelSettings.model_validate(order["settings"])
    backend = make_backend(settings)
    try:
        info = await backend.start()
        tokens = await asyncio.gather(
            *(
                complete(backend, settings.name, number, prompt, order["max_tokens"])
                for number, prompt in enumerate(order["prompts"])
            )
        )
        return {"tokens": tokens, "info": msgspec.to_builtins(info)}
    finally:
        await backend.shutdown()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.load(sys.stdin)))), flush=True)
