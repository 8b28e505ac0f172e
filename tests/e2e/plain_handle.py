"""The Python handle on an ordinary Ray, without the fast path: `python -m tests.e2e.plain_handle PORT FOLDER`.

Prints one JSON object: what the callers saw.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import ray
import requests
from ray import serve

from serve_app import connect
from serve_app.errors import NotFound, ServeAppError
from tests.e2e import caller_app
from tests.e2e.plain_serve import ANSWER_S, GIVEN_BACK_S, KEY, granted, start_ray
from tests.waiting import patient, wait_until

HELLO = [{"role": "user", "content": "hi"}]
MODEL = caller_app.MODEL
CONFIG: dict[str, Any] = {
    "models": [{"name": MODEL, "engine": "simulated", "max_num_seqs": 4, "simulated": {"decode_step_s": 0.005}}],
    "auth": {"keys": [{"key": KEY}]},
    "batch": {"workers": 0},
}


def given_back(url: str) -> float:
    """Slots still granted, once they are given back; there is no event of it over HTTP."""
    headers = {"Authorization": f"Bearer {KEY}"}
    return wait_until(lambda: granted(url, headers), GIVEN_BACK_S, "slots granted", wanted=0.0, poll_s=0.05).found


async def left(llm: Any) -> None:
    async for _ in llm.stream(HELLO, max_tokens=4000):
        break
    call = asyncio.create_task(llm.chat(HELLO, max_tokens=4000))
    await asyncio.sleep(patient(0.5))  # it runs by then; if not, it is cancelled in the line
    call.cancel()
    await asyncio.wait({call})


def error_of(call: Any) -> list[Any]:
    try:
        call()
    except ServeAppError as error:
        return [isinstance(error, NotFound), error.status, error.code]
    return []


def seen(url: str) -> dict[str, Any]:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 6}
    over = requests.post(
        f"{url}/v1/chat/completions", headers={"Authorization": f"Bearer {KEY}"}, json=body, timeout=ANSWER_S
    ).json()["choices"][0]["message"]["content"]
    os.environ["SERVE_APP_API_KEY"] = KEY
    llm = connect()
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in llm.sync.stream(HELLO, max_tokens=6))
    plain = serve.get_app_handle("serve_app")
    chunks = plain.options(stream=True).stream.remote(HELLO, api_key=KEY, model=MODEL, max_tokens=6)
    caller = serve.run(caller_app.build(KEY), name=caller_app.NAME, route_prefix=None)
    asyncio.run(left(llm))
    return {
        "client": [llm.sync.chat(HELLO, max_tokens=6).choices[0].message.content == over, streamed == over],
        "plain": "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == over,
        "another deployment": [
            caller.plainly.remote(HELLO, max_tokens=6).result()["choices"][0]["message"]["content"] == over,
            caller.by_client.remote(HELLO, max_tokens=6).result() == over,
            caller.sync_in_a_thread.remote(HELLO).result() == " ".join(over.split(" ")[:5]),
        ],
        "errors": [
            error_of(lambda: llm.sync.chat(HELLO, model="nobody")),
            error_of(lambda: plain.chat.remote(HELLO, api_key=KEY, model="nobody").result()),
        ],
        "after leaving": given_back(url),
    }


def main(port: int, folder: str) -> dict[str, Any]:
    from serve_app.app import build

    start_ray(folder)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(CONFIG), name="serve_app")
        return seen(f"http://127.0.0.1:{port}")
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2])), flush=True)
