"""How long the endpoint is closed when HAProxy, or Serve's manager of it, is killed.

    python -m benchmarks.edge_deaths --victim haproxy --kills 3 [--busy] [--environment NAME=VALUE ...]

A client asks for the list of models every 50 ms, over a new connection each time, from before the kill until Serve has
replaced what was killed and ten seconds have passed. Told per kill: the seconds from the kill to the last answer that
was not 200, how the requests in between ended, and the seconds until Serve had its own again. `--busy` keeps every core
busy with two processes meanwhile.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import requests

from benchmarks.common.child import ends_with_us
from benchmarks.common.processes import arguments_of, title_of
from benchmarks.common.scaling_stack import MODEL, Stage, stack

CONFIG = {
    "models": [{"name": MODEL, "engine": "simulated", "max_num_seqs": 4, "simulated": {"decode_step_s": 0.005}}],
    "router": {"replicas": 2},
}
PERIOD_S = 0.05
ANSWER_S = 1.0  # a request that hangs for longer counts as closed
AFTER_S = 10.0
GIVEN_UP_S = 150.0
MANAGER = "ray::HAProxyManager"
HOGS_PER_CORE = 2


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """So many processes that do nothing but use a core."""
    hog = [*ends_with_us(signal.SIGTERM), sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(hog) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def found(stage: Stage) -> dict[str, int]:
    """The newest HAProxy that listens to Serve, and its manager."""
    pids = stage.cluster.pids()
    manager = max((pid for pid in pids if title_of(pid).startswith(MANAGER)), default=0)
    folder = f"{stage.cluster.instance.run_dir}/h/"
    ours = [pid for pid in pids if any(word.startswith(folder) for word in arguments_of(pid))]
    return {"manager": manager, "haproxy": max(ours, default=0)}


def ask(stage: Stage) -> str:
    """How a request of now ends."""
    headers = {"Authorization": f"Bearer {stage.key}", "Connection": "close"}
    try:
        answer = requests.get(f"{stage.cluster.url}/v1/models", headers=headers, timeout=ANSWER_S)
    except requests.RequestException as error:
        return type(error).__name__
    return str(answer.status_code)


def kill(stage: Stage, victim: str) -> dict[str, object]:
    """Kill it and look until Serve has its own again."""
    before = found(stage)
    os.kill(before[victim], signal.SIGKILL)
    began = time.monotonic()
    last_bad = 0.0
    replaced = None
    ends: collections.Counter[str] = collections.Counter()
    while (now := time.monotonic() - began) < (GIVEN_UP_S if replaced is None else replaced + AFTER_S):
        end = ask(stage)
        ends[end] += 1
        if end != "200":
            last_bad = time.monotonic() - began
        elif replaced is None and now - last_bad > 1.0:
            after = found(stage)
            if after["manager"] not in (0, before["manager"]) and after["haproxy"] not in (0, before["haproxy"]):
                replaced = now
        time.sleep(PERIOD_S)
    return {
        "victim": victim,
        "closed_s": round(last_bad, 2),
        "serve_again_s": None if replaced is None else round(replaced, 1),
        "ends": dict(ends),
    }


def main() -> None:
    """One line of JSON for each kill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victim", choices=["haproxy", "manager"], action="append", required=True)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    environment = dict(pair.split("=", 1) for pair in given.environment)
    with (
        stack(CONFIG, environment=environment) as stage,
        hogs(HOGS_PER_CORE * (os.cpu_count() or 1) if given.busy else 0),
    ):
        for victim in given.victim:
            for _ in range(given.kills):
                print(json.dumps(kill(stage, victim) | {"busy": given.busy}), flush=True)


if __name__ == "__main__":
    main()
