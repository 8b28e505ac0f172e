"""Large requests and costly grammars, one after the other, against one vLLM engine alone: `python -m tests.e2e.attacks`
prints what was seen of both as JSON."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

from serve_app.engine.deployment import make_backend
from serve_app.settings.settings import BUILT_IN_MODEL
from tests.e2e import grammar_attack, large_attack, one_engine
from tests.e2e.large_attack import TurnMeter


@functools.cache
def found() -> dict[str, Any]:
    """What such a process has printed."""
    return one_engine.run_module("tests.e2e.attacks")


async def attacked(meter: TurnMeter) -> dict[str, Any]:
    backend = make_backend(BUILT_IN_MODEL.model_copy(update={"enforce_eager": True}))  # only grammars are compiled
    await backend.start()
    try:
        large = await large_attack.seen(backend, meter)
        return {"large": large, "grammars": await grammar_attack.seen(backend)}
    finally:
        await backend.shutdown()


if __name__ == "__main__":
    turns = TurnMeter()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
        print(json.dumps(runner.run(attacked(turns))), flush=True)
