"""The application on an ordinary Ray, without the fast path: `python -m tests.e2e.plain_serve PORT FOLDER`.

Prints one JSON object: what a caller saw.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import ray
import requests
from ray import serve

from serve_app.system import may_start_again
from tests.waiting import wait_until

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
GIVEN_BACK_S = 5.0  # bound of a wait that takes milliseconds
ANSWER_S = 120.0  # against hanging: the slowest answer waits for a replica's start, five seconds on an idle machine


def granted(url: str, headers: dict[str, str]) -> float:
    lines = requests.get(f"{url}/metrics", headers=headers, timeout=ANSWER_S).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'state="granted"' in line)


def seen(url: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": True}
    chat = requests.post(f"{url}/v1/chat/completions", headers=headers, json=body, timeout=ANSWER_S)
    long = {"model": "sim", "prompt": "hi", "max_tokens": 4000, "stream": True}
    with requests.post(f"{url}/v1/completions", headers=headers, json=long, stream=True, timeout=ANSWER_S) as left:
        lines = left.iter_lines()  # kept: the connection is closed with the iterator
        next(lines)
        running = granted(url, headers)
    # there is no event of it over HTTP
    given_back = wait_until(lambda: granted(url, headers), GIVEN_BACK_S, "slots granted", wanted=0.0, poll_s=0.05)
    return {
        "without a key": requests.get(f"{url}/v1/models", timeout=ANSWER_S).status_code,
        "chat": chat.status_code,
        "done": chat.text.rstrip().endswith("data: [DONE]"),
        "running": running,
        "after leaving": given_back.found,
        # no policy of ours decides here: a call that waits in Serve's handle starts the first replica
        "from zero": requests.post(
            f"{url}/v1/completions", headers=headers, json=long | {"model": "asleep", "max_tokens": 3}, timeout=ANSWER_S
        ).status_code,
    }


def start_ray(folder: str) -> None:
    """Ray gives its node 30 s to start, which a slow machine misses; the next try is warm."""
    for attempts in itertools.count(1):
        try:
            ray.init(
                num_cpus=4,
                include_dashboard=False,
                _temp_dir=folder,
                object_store_memory=100_000_000,
                log_to_driver=False,
            )
        except Exception as error:
            if not may_start_again(attempts, str(error)):
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
