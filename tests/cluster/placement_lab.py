"""What the placement tests see of their cluster: its nodes, the application on it, and its HTTP endpoint.

The cluster runs in a process tree of its own (`placement_nodes`), with its own ports, token and mark, so that it lives
beside any other Ray of this machine and nothing of it is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import requests

from serve_app.cluster.local import LOOPBACK
from serve_app.cluster.local.node import node_environment, usable_environment
from serve_app.cluster.local.ports import reserved_block
from serve_app.names import MARK, deployment_of
from serve_app.system import end_marked, marked
from tests.waiting import patient, wait_until

KEY = "sk-placement-0123456789"
ORDER_S = 90.0  # the slowest order ends a cluster under load: Serve's 20 s, and a second or two for each node
STATE_S = 60.0  # for Serve to carry out what takes 5 s on an idle machine
DEVICE_GB = 80  # of a counted GPU: there is no NVML to ask
ANSWER_POLL_S = 0.005  # most orders take milliseconds
TICK_S = 0.2  # states change within half a second, and each look costs Serve's controller a few milliseconds

HEAD_START_S = 30.0  # as Ray itself has it, which counts the wall's seconds


def ray_s_bounds() -> dict[str, str]:
    """Ray finds a silent node dead after 15 s by default; these find it in about 5 on a quiet machine, and stay above
    what two cores that others use may keep a raylet from answering."""
    return {
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": str(int(1000 * patient(2.0))),
        "RAY_health_check_failure_threshold": "4",
        "RAY_gcs_server_port_wait_time_s": str(int(patient(HEAD_START_S))),
    }


class Lab:
    """The cluster and the application on it."""

    def __init__(self, process: subprocess.Popen[str], port: int, order_s: float) -> None:
        self.url = f"http://{LOOPBACK}:{port}"
        self._process = process
        self._order_s = order_s
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="answers of the nodes").start()
        self._workers: set[str] = set()
        self._models: list[str] = []

    def ask(self, do: str, **order: Any) -> Any:
        """Carry out an order of `placement_nodes`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        wait_until(lambda: not self._answers.empty(), self._order_s, "the nodes have answered", poll_s=ANSWER_POLL_S)
        line = self._answers.get()
        assert line is not None, "the process of the nodes has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["answer"]

    def add(self, name: str, gpus: int, cpus: int | None = None) -> None:
        """A node with these GPUs, and a CPU for each of them unless it is said how many."""
        self.ask("add", name=name, gpus=gpus, cpus=gpus if cpus is None else cpus)
        self._workers.add(name)

    def kill(self, name: str) -> None:
        """Every process of the node at once."""
        self.ask("kill", name=name)
        self._workers.discard(name)

    def empty(self) -> None:
        """No application's engines and no nodes but the head, on which the router stays."""
        self.deploy([])
        self.until(lambda: not self.ask("groups"), "no engine left", lambda: self.ask("groups"))
        for name in sorted(self._workers):
            self.ask("remove", name=name)
        self._workers.clear()

    def deploy(self, models: list[Mapping[str, Any]]) -> None:
        """Serve these models, and one small one that keeps the application alive on the head."""
        self.ask("deploy", config=self._config(models))

    def declare(self, models: list[Mapping[str, Any]], override: Mapping[str, Any]) -> None:
        """The same by Serve's configuration, with other options for one deployment."""
        self.ask("declare", config=self._config(models), override=dict(override))

    def declare_ours(self, models: list[Mapping[str, Any]]) -> None:
        """Serve these models as `serve-app up` does, with our policy in Serve's controller."""
        self.ask("declare_ours", config=self._config(models))

    def _config(self, models: list[Mapping[str, Any]]) -> dict[str, Any]:
        self._models = [model["name"] for model in models]
        return {
            "models": [*models, ANCHOR],
            "auth": {"keys": [{"key": KEY}]},
            "quota": {"device_gb": DEVICE_GB},
            "batch": {"workers": 0},
        }

    def status(self, model: str) -> Mapping[str, Any]:
        """What `serve-app status` shows of a model."""
        found = self.ask("status", models=[*self._models, ANCHOR["name"]])
        return next((entry for entry in found["models"] if entry["name"] == model), ABSENT)

    def groups(self, model: str) -> list[dict[str, Any]]:
        """The placement groups of a model's replicas."""
        wanted = f"#{deployment_of(model)}#"
        return [group for group in self.ask("groups") if wanted in group["of"]]

    def grants(self, model: str) -> list[dict[str, int]]:
        """What each engine of a model holds in the ledger, once all of them run: bytes by device, `a/0` the first of
        node a."""

        def committed() -> list[dict[str, int]] | None:
            found = [one for one in self.ask("quota")["engines"] if one["model"] == model]
            return [one["devices"] for one in found] if all(one["state"] == "committed" for one in found) else None

        return self.until(committed, "grants", lambda: self.ask("quota"))  # type: ignore[no-any-return]

    def states(self, model: str) -> list[str]:
        """The states of a model's replicas."""
        return sorted(replica["state"] for replica in self.status(model)["replicas"])

    def placed(self, model: str, replicas: int) -> list[list[str]]:
        """The nodes of each replica's bundles, once this many run and no other group of the model is left."""

        running = ["RUNNING"] * replicas

        def settled() -> list[list[str]] | None:
            groups = self.groups(model)
            made = [group["nodes"] for group in groups if group["state"] == "CREATED"]
            return made if len(made) == len(groups) == replicas and self.states(model) == running else None

        found = self.until(settled, f"{replicas} of {model}", lambda: (self.status(model), self.groups(model)))
        return sorted(found)

    def until(
        self, probe: Callable[[], Any], goal: str, seen: Callable[[], Any] = lambda: None, within_s: float = STATE_S
    ) -> Any:
        """What `probe` gives once it gives something; bounded."""
        return wait_until(probe, within_s, goal, seen=seen, poll_s=TICK_S).found  # Serve tells its states when asked

    def complete(self, model: str, tokens: int = 4, **more: Any) -> requests.Response:
        """One completion through the router's endpoint."""
        return requests.post(
            f"{self.url}/v1/completions",
            headers={"Authorization": f"Bearer {KEY}"},
            json={"model": model, "prompt": "where am I?", "max_tokens": tokens, **more},
            timeout=patient(STATE_S),
            stream=more.get("stream", False),
        )

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)


ABSENT: Mapping[str, Any] = {"state": "absent", "message": "", "replicas": []}
ANCHOR: dict[str, Any] = {"name": "anchor", "engine": "simulated", "cpus_per_rank": 0}


@contextlib.contextmanager
def lab(order_s: float = ORDER_S) -> Iterator[Lab]:
    """A head without GPUs, its router and endpoint; nothing of it is left after the block.

    Args:
        order_s: bound of one order.
    """
    mark = f"placement-{secrets.token_hex(8)}"
    run_dir = Path(tempfile.mkdtemp(prefix="sp-", dir="/tmp"))  # short: a unix socket's path has 107 bytes at most
    log = run_dir / "nodes.log"
    (run_dir / "ray").mkdir()
    with reserved_block(LOOPBACK) as block:
        environment = usable_environment(os.environ) | node_environment(mark, secrets.token_hex(32), run_dir, block)
        # RAY_TMPDIR: else the address of this cluster becomes that of any `ray.init()` on the machine
        environment |= ray_s_bounds() | {MARK: mark, "RAY_TMPDIR": str(run_dir)}
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.placement_nodes", str(run_dir / "ray")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
        try:
            made = Lab(process, block.http, order_s)
            made.answer()  # the head is up
            made.ask("serve", port=block.http)
            made.deploy([])
            made.until(lambda: made.states(ANCHOR["name"]) == ["RUNNING"], "the anchor", lambda: made.status("anchor"))
            yield made
            made.ask("end")
        except BaseException:
            print(log.read_text(errors="replace")[-5000:], file=sys.stderr)
            raise
        finally:
            process.kill()
            process.wait()
            end_marked(mark, 0.0)
            shutil.rmtree(run_dir, ignore_errors=True)
    assert not marked(mark)
