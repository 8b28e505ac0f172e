"""The application on an ordinary Ray, without the fast path: `python -m tests.e2e.plain_serve PORT FOLDER`.

Prints one JSON object: what a caller saw.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray
import requests
from ray import serve

KEY = "sk-plain-serve-0123456789"
CONFIG: dict[str, Any] = {
    "models": [
        {"name": "sim", "engine": "simulated", "max_num_seqs": 4, "simulated": {"decode_step_s": 0.005}},
        {
            "name": "asleep",
            "engine": "simulated",
            "simulated": {"decode_step_s": 0.005},
            "replicas": {"min_replicas": 0, "max_replicas": 2, "downscale_delay_s": 1},
        },
    ],
    "auth": {"keys": [{"key": KEY, "metrics": True, "models": ["sim", "asleep"]}]},
    "batch": {"workers": 0},
}
START_ATTEMPTS = 3
GIVEN_BACK_S = 5.0  # bound of a wait that takes milliseconds


def granted(url: str, headers: dict[str, str]) -> float:
    lines = requests.get(f"{url}/metrics", headers=headers, timeout=10).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'state="granted"' in line)


def seen(url: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": True}
    chat = requests.post(f"{url}/v1/chat/completions", headers=headers, json=body, timeout=30)
    long = {"model": "sim", "prompt": "hi", "max_tokens": 4000, "stream": True}
    with requests.post(f"{url}/v1/completions", headers=headers, json=long, stream=True, timeout=30) as left:
        lines = left.iter_lines()  # kept: the connection is closed with the iterator
        next(lines)
        running = granted(url, headers)
    until = time.monotonic() + GIVEN_BACK_S
    while granted(url, headers) and time.monotonic() < until:
        time.sleep(0.05)  # bound: GIVEN_BACK_S; there is no event of it over HTTP
    return {
        "without a key": requests.get(f"{url}/v1/models", timeout=10).status_code,
        "chat": chat.status_code,
        "done": chat.text.rstrip().endswith("data: [DONE]"),
        "running": running,
        "after leaving": granted(url, headers),
        # no policy of ours decides here: a call that waits in Serve's handle starts the first replica
        "from zero": requests.post(
            f"{url}/v1/completions", headers=headers, json=long | {"model": "asleep", "max_tokens": 3}, timeout=90
        ).status_code,
    }


def start_ray(folder: str) -> None:
    """Ray gives its raylet 15 s to start, which a loaded machine misses; the next try is warm."""
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(
                num_cpus=4,
                include_dashboard=False,
                _temp_dir=folder,
                object_store_memory=100_000_000,
                log_to_driver=False,
            )
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt + 1 == START_ATTEMPTS:
                raise
            ray.shutdown()
        else:
            return


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
