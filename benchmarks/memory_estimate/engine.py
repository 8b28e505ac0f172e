"""One engine in a process of its own: `python -m benchmarks.memory_estimate.engine FOLDER SHAPE`.

It is started, loaded with the longest step, a full batch and a grammar, and measured all the while; then once more for
as long as what is kept for the next start has to stand. The last line on the output is a JSON object.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.output import write_line
from benchmarks.memory_estimate.shapes import Shape
from serve_app.engine import deployment
from serve_app.engine.start import environment, memory_grant, memory_history, memory_size, model_lookup
from serve_app.settings import ModelSettings
from serve_app.transport import EngineBackend, EngineInfo, Submit
from serve_app.types import Operation

MEASURE_S = 0.2  # between two measurements
IDLE_S = 2.0  # of measuring an engine that has just started
KV_GB = 0.3
SPARE_TOKENS = 64  # of a prompt that fills the KV cache
SHORT_TOKENS = 16
ANSWER_TOKENS = 4


@dataclass(eq=False)
class Watch:
    """The largest memory of this process and its children that stood for two measurements, since its begin and since
    `recent_bytes` was reset: a fork counts twice. And the least since `least_bytes` was reset."""

    meter: memory_grant.MemoryMeter = field(default_factory=lambda: memory_grant.MemoryMeter("here", gpus=False))
    most_bytes: int = 0
    recent_bytes: int = 0
    least_bytes: int = sys.maxsize
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        before = 0
        while not self._ended.wait(MEASURE_S):
            self.meter.measure(())
            stood = min(before, self.meter.resident_bytes)
            self.most_bytes = max(self.most_bytes, stood)
            self.recent_bytes = max(self.recent_bytes, stood)
            before = self.meter.resident_bytes
            self.least_bytes = min(self.least_bytes, before)

    def end(self) -> None:
        self._ended.set()


def settings_of(shape: Shape, folder: Path) -> ModelSettings:
    return ModelSettings.model_validate(
        {
            "name": "m",
            "path": str(folder),
            "dtype": shape.dtype,
            "kv_cache_gb": KV_GB,
            "max_num_seqs": shape.sequences,
            "max_num_batched_tokens": shape.step_tokens,
            "max_model_len": shape.length,
            "enforce_eager": shape.eager,
        }
    )


async def ask(backend: EngineBackend, number: int, operation: Operation, body: dict[str, Any]) -> None:
    async for frame in backend.run(Submit(number, f"r{number}", operation, {"model": "m", **body})):
        if frame.status >= 400:
            raise RuntimeError(frame.body.decode())


async def load(backend: EngineBackend, shape: Shape, info: EngineInfo) -> None:
    """What takes most memory: the longest step, a full batch that samples, a grammar."""
    numbers: Iterator[int] = itertools.count(1)
    length = min(shape.step_tokens, shape.length - ANSWER_TOKENS, info.kv_cache_tokens - SPARE_TOKENS)
    prompt = [index % 1000 for index in range(length)]
    await ask(backend, next(numbers), Operation.COMPLETION, {"prompt": prompt, "max_tokens": ANSWER_TOKENS})
    batch = min(shape.sequences, info.kv_cache_tokens // (2 * info.kv_block_tokens))
    sampled = {"max_tokens": ANSWER_TOKENS, "temperature": 1, "top_p": 0.9, "logprobs": 5}
    bodies = [{"prompt": [index] * SHORT_TOKENS, **sampled} for index in range(batch)]
    await asyncio.gather(*(ask(backend, next(numbers), Operation.COMPLETION, body) for body in bodies))
    message = {"role": "user", "content": "A B"}
    grammar = {"messages": [message], "max_tokens": ANSWER_TOKENS, "structured_outputs": {"choice": ["A", "B"]}}
    await ask(backend, next(numbers), Operation.CHAT, grammar)


async def main(folder: Path, shape: Shape) -> dict[str, Any]:
    settings = settings_of(shape, folder)
    facts = model_lookup.look_up(settings)
    watch = Watch()
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        backend = deployment.make_backend(settings)
        info = await backend.start()
        await asyncio.sleep(IDLE_S)
        idle_bytes = watch.meter.resident_bytes - info.kv_cache_bytes
        watch.recent_bytes = 0
        await load(backend, shape, info)
        watch.least_bytes = sys.maxsize
        await asyncio.sleep(memory_history.STOOD_S)
    finally:
        watch.end()
        thread.join()
    need = memory_size.estimated_need(settings, environment.platform(), facts.weights_bytes or 0, facts.config)
    backend.kill()
    return {
        "weights_bytes": facts.weights_bytes,
        "estimated_bytes": need.fixed_bytes,
        "idle_bytes": idle_bytes,
        "measured_bytes": watch.most_bytes - info.kv_cache_bytes,
        "recurring_bytes": watch.recent_bytes - info.kv_cache_bytes,
        "kept_bytes": watch.least_bytes - info.kv_cache_bytes,
    }


if __name__ == "__main__":
    write_line(json.dumps(asyncio.run(main(Path(sys.argv[1]), Shape(**json.loads(sys.argv[2]))))))
    os._exit(0)  # vLLM's own end takes seconds
