"""SIGTERM to EngineCore under requests: vLLM ends them as if their answers were whole."""

from __future__ import annotations

import asyncio
import multiprocessing
from typing import Any

import msgspec

from serve_app.transport import EngineBackend
from serve_app.types import Operation
from tests.e2e.continued_streams import messages, request
from tests.fakes.engines import until
from tests.waiting import patient

ENDED_S = 30.0
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
ASKED: dict[str, tuple[Operation, dict[str, Any]]] = {
    "chat": (Operation.CHAT, LONG),
    "chat_whole": (Operation.CHAT, LONG | {"stream": False}),
    "chat_pair": (Operation.CHAT, LONG | {"n": 2, "temperature": 1.0}),
    "completion": (Operation.COMPLETION, LONG),
    "completion_prompts": (Operation.COMPLETION, LONG | {"prompt": ["A river", "A stone"]}),
    "completion_whole": (Operation.COMPLETION, LONG | {"stream": False}),
    "messages": (Operation.MESSAGES, LONG),
    "messages_whole": (Operation.MESSAGES, LONG | {"stream": False}),
    "responses": (Operation.RESPONSES, {"max_output_tokens": 400, "ignore_eos": True}),
    "responses_whole": (Operation.RESPONSES, {"max_output_tokens": 400, "ignore_eos": True, "stream": False}),
}


async def end_core(backend: EngineBackend) -> dict[str, Any]:
    """By name: the failure and the text of its frames."""
    submits = [request(name, *asked) for name, asked in ASKED.items()]
    submits = [msgspec.structs.replace(one, number=number) for number, one in enumerate(submits, 900)]
    running = [asyncio.create_task(messages(backend, one)) for one in submits]
    steps = backend.load().steps
    await until(lambda: backend.load().steps > steps + 20, patient(ENDED_S), "some tokens; others wait in the engine")
    (core,) = [child for child in multiprocessing.active_children() if "EngineCore" in child.name]
    core.terminate()
    answers = await asyncio.wait_for(asyncio.gather(*running), patient(ENDED_S))
    return {
        name: {"failure": failure, "text": b"".join(frame.body for frame in frames).decode()}
        for name, (frames, failure) in zip(ASKED, answers, strict=True)
    }
