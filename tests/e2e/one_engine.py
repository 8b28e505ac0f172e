"""An engine alone, without Ray, in a process of its own: `python -m tests.e2e.one_engine` with an order on its input.

The order is a JSON object: `settings` of one model, `prompts` as token ids, `max_tokens` of each. The prompts are
completed greedily, all at once, or embedded where that is the model's task (`salts`: once with each of these cache
salts, one after the other). The answer, the last line on the output, is a JSON object with `tokens` (the produced ids)
or `embeddings` and `cached` (prompt tokens of each call that were cached), and `info` (what the engine says of itself).
Of an embedding model, `scores` are the arguments of `score` (with a `query`: a rerank), one after the other; `scored`
has the status of each, its answer, its prompt tokens and those of them that were cached. `bodies` are bodies of
embeddings; `statuses` has the status of each. Of every model but a generating one, `asked` are operations with a body
and a salt each, a `file` in it as base64; `answered` has the status of each, its answer (of a stream its events), its
prompt tokens and those of them that were cached.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from typing import Any

import msgspec

from serve_app.engine.deployment import make_backend
from serve_app.settings.settings import ModelSettings
from serve_app.transport import EngineBackend, Submit
from serve_app.types import Operation
from tests.waiting import patient

ENGINE_S = 600.0  # beside the shared engine on two cores a start takes minutes, seconds elsewhere
VLLM_VARIABLES = ("VLLM_", "OMP_", "KMP_")  # the caller's own must not decide about the engine


def run_alone(order: dict[str, Any]) -> dict[str, Any]:
    """The answer of such a process; the test fails with its last words if it fails."""
    return run_module("tests.e2e.one_engine", json.dumps(order))


def run_module(module: str, reported: str = "") -> dict[str, Any]:
    """The last line of a module that runs an engine in a process of its own, and is told this on its input."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(VLLM_VARIABLES)}
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=reported,
        capture_output=True,
        text=True,
        timeout=patient(ENGINE_S),
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


async def complete(backend: EngineBackend, model: str, number: int, prompt: list[int], max_tokens: int) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    tokens: list[int] = []
    async for piece in backend.run(Submit(number, f"one-{number}", Operation.COMPLETION, body)):
        if piece.status >= 400:
            raise RuntimeError(piece.body.decode())
        tokens += [token for _, *group in piece.groups for token in group]
    return tokens


async def embed(
    backend: EngineBackend, model: str, prompts: list[list[int]], salt: str | None
) -> tuple[list[list[float]], int]:
    """The embeddings, and the cached tokens of all prompts."""
    order = Submit(1, f"salted-{salt}", Operation.EMBEDDING, {"model": model, "input": prompts}, cache_salt=salt)
    (piece,) = [piece async for piece in backend.run(order)]
    if piece.status >= 400:
        raise RuntimeError(piece.body.decode())
    assert piece.usage is not None
    return [entry["embedding"] for entry in json.loads(piece.body)["data"]], piece.usage.cached_tokens


async def status(backend: EngineBackend, model: str, body: dict[str, Any]) -> int:
    """The status of an embedding's answer."""
    order = Submit(1, "status", Operation.EMBEDDING, {"model": model} | body)
    (piece,) = [piece async for piece in backend.run(order)]
    return piece.status


async def score(
    backend: EngineBackend, body: dict[str, Any], salt: str | None, query_counted: bool = False
) -> tuple[int, Any, int, int]:
    operation = Operation.RERANK if "query" in body else Operation.SCORE
    order = Submit(1, f"scored-{salt}", operation, body, cache_salt=salt, query_counted=query_counted)
    (piece,) = [piece async for piece in backend.run(order)]
    assert piece.usage is not None
    return piece.status, json.loads(piece.body), piece.usage.prompt_tokens, piece.usage.cached_tokens


async def ask(backend: EngineBackend, operation: str, body: dict[str, Any], salt: str | None) -> list[Any]:
    if "file" in body:
        body |= {"file": base64.b64decode(body["file"])}
    submit = Submit(1, f"asked-{salt}", Operation(operation), body, cache_salt=salt)
    pieces = [piece async for piece in backend.run(submit)]
    usage = pieces[-1].usage
    assert usage is not None
    text = b"".join([piece.body for piece in pieces]).decode()
    answer = json.loads(text) if pieces[0].media == "json" else text
    return [pieces[0].status, answer, usage.prompt_tokens, usage.cached_tokens]


async def main(order: dict[str, Any]) -> dict[str, Any]:
    settings = ModelSettings.model_validate(order["settings"])
    backend = make_backend(settings)
    try:
        info = await backend.start()
        if settings.task != "generate" and "asked" in order:
            answered = [await ask(backend, *one) for one in order["asked"]]
            return {"answered": answered, "info": msgspec.to_builtins(info)}
        if settings.task == "embed":
            salts = order.get("salts", [None])
            answers = [await embed(backend, settings.name, order["prompts"], salt) for salt in salts]
            cached = [count for _, count in answers]
            scored = [await score(backend, *one) for one in order.get("scores", [])]
            found: dict[str, Any] = {"embeddings": answers[-1][0], "cached": cached, "scored": scored}
            found["statuses"] = [await status(backend, settings.name, body) for body in order.get("bodies", [])]
            return found | {"info": msgspec.to_builtins(info)}
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
