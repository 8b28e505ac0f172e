"""Requests with pictures, cut and continued, stopped, and fetched, on a vLLM engine with an image tower beside a router
and the quota actor in one process: `python -m tests.e2e.vision` prints them as JSON.

`cut` is as in `continued_streams`, `stopped` as in `stopped_requests`, `pictures` as in `image_requests`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from serve_app.http import engine_calls
from serve_app.settings.settings import BUILT_IN_MODEL
from serve_app.types import Operation
from tests.e2e import one_engine
from tests.e2e.continued_streams import CREATED, GO_ON, SCHEMA, SCHEMA_TOKENS, USAGE, cut, request
from tests.e2e.image_requests import ALLOWED, DOMAINS, ask_about_pictures
from tests.e2e.images import anthropic_messages, chat_messages, data_url, picture, response_input, serving
from tests.e2e.small_models import write_vision
from tests.e2e.stopped_requests import ENGINE_S, MESSAGES, REPLICA, SLOTS, each_stopped
from tests.fakes.asgi_client import CHAT, started
from tests.fakes.engines import MODEL, FakeCluster, run, until

PICTURED = chat_messages(data_url(picture()))
CUT: dict[str, tuple[Operation, dict[str, Any]]] = {
    "chat": (Operation.CHAT, GO_ON | USAGE),
    "chat_image": (Operation.CHAT, GO_ON | USAGE | PICTURED),
    "chat_image_schema": (Operation.CHAT, PICTURED | {"response_format": SCHEMA, "max_tokens": SCHEMA_TOKENS}),
    "messages_image": (Operation.MESSAGES, GO_ON | anthropic_messages(picture())),
    "responses_image": (Operation.RESPONSES, GO_ON | response_input(data_url(picture()))),
}
STOPPED: dict[str, tuple[str, dict[str, Any]]] = {
    f"{kind}_{name}": (path, GO_ON | messages | {"stream": kind == "streamed"})
    for kind in ("whole", "streamed")
    for name, path, messages in (
        ("chat_image", CHAT, PICTURED),
        ("messages_image", MESSAGES, anthropic_messages(picture())),
    )
}


@functools.cache
def found() -> dict[str, Any]:
    """What such a process has printed."""
    return one_engine.run_module("tests.e2e.vision")


async def scenario(cluster: FakeCluster) -> None:
    client = await started(cluster, REPLICA)
    await until(lambda: client.model.replica_set.info is not None, ENGINE_S, "the engine's limits")
    backend = cluster[REPLICA].engine.backend
    answer: dict[str, Any] = {"cut": {name: await cut(backend, request(name, *asked)) for name, asked in CUT.items()}}
    with serving(ALLOWED, picture()) as server:
        answer["pictures"] = await ask_about_pictures(client, picture(), server)
    answer["stopped"] = await each_stopped(client, STOPPED)
    print(json.dumps(answer), flush=True)


def main() -> None:
    changed = {"name": MODEL, "enforce_eager": True, "max_num_seqs": SLOTS, "media_domains": DOMAINS}
    more = {"limit_mm_per_prompt": {"image": 2}, "mm_processor_cache_gb": 0.1}
    clock = SimpleNamespace(time=lambda: CREATED, monotonic=time.monotonic)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(engine_calls, "time", clock):
        path = str(write_vision(Path(folder) / "vision"))
        settings = BUILT_IN_MODEL.model_copy(update=changed | {"path": path, "extra_engine_args": more})
        run(scenario, settings, loop=asyncio.new_event_loop, bound_s=ENGINE_S)


if __name__ == "__main__":
    main()
