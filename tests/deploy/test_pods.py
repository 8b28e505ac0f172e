"""The manifest's start command on the image, without Kubernetes: a head and two workers, each the image's root in
namespaces of its own, as KubeRay would start, configure, probe and end them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.cluster.hosts import Rack, rack
from tests.deploy import dockerfile
from tests.requires import requires
from tests.waiting import patient, wait_until

ROOT = Path(__file__).resolve().parents[2]
*_, SERVICE = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "rayservice.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
CONTAINERS = {
    "head": CLUSTER["headGroupSpec"]["template"]["spec"]["containers"][0],
    "worker": CLUSTER["workerGroupSpecs"][0]["template"]["spec"]["containers"][0],
}
IMAGE = dockerfile.read((ROOT / "deploy" / "Dockerfile").read_text())[-1]
TOKEN = "t" * 64
KEY = "sk-pods-0123456789abcdef"
# As the operator generates it for these pods' resources.
GENERATED = (
    "ray start {role} --block --dashboard-agent-listen-port=52365 --memory=4000000000 --metrics-export-port=8080 "
)
READY_S = 150.0  # a node and its agent start in 14 s, Serve and two replicas in 12 s
DRAINED_S = 200.0  # 37 s: 30 of them are Serve's, for a HAProxy that is to go
STREAMS = 4  # a worker

# Sends the request of its first argument; prints status and body.
ASK = """
import json, sys, urllib.error, urllib.request
order = json.loads(sys.argv[1])
request = urllib.request.Request(order["url"], headers=order["headers"], method=order["method"],
                                 data=order["body"].encode() if order["body"] else None)
try:
    with urllib.request.urlopen(request, timeout=order["timeout_s"]) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print(0, error)
"""


class Pods:
    """The nodes by the names of their hosts."""

    def __init__(self, hosts: Rack, image: Path, folder: Path) -> None:
        self.hosts = hosts
        self._image = image
        self._folder = folder
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, kind: str, generated: str) -> None:
        layer = self._folder / name
        layer.mkdir()
        command = dockerfile.command_in(
            self._image,
            CONTAINERS[kind]["command"],
            folder="/home/serve-app",
            user=IMAGE.last("USER").rest,
            layer=layer,
        )
        given = IMAGE.environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        environment = dockerfile.environment_in(given | {"KUBERAY_GEN_RAY_START_CMD": generated})
        with (self._folder / f"{name}.log").open("wb") as log:
            self._started[name] = subprocess.Popen(
                self.hosts[name].command(*command, environment=environment), stdout=log, stderr=log
            )

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def ask(
        self, name: str, path: str, *, port: int = 8000, secret: str = KEY, body: Any = None, put: bool = False
    ) -> Any:
        """An HTTP request from the head's host to a pod; returns the running client."""
        order = {
            "url": f"http://{self.hosts[name].address}:{port}{path}",
            "headers": {
                "Content-Type": "application/json",
                **({"Authorization": f"Bearer {secret}"} if secret else {}),
            },
            "method": "PUT" if put else ("GET" if body is None else "POST"),
            "body": "" if body is None else json.dumps(body),
            "timeout_s": patient(READY_S),
        }
        line = self.hosts["head"].command(sys.executable, "-c", ASK, json.dumps(order))
        return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)

    def answer(self, name: str, path: str, **order: Any) -> tuple[int, str]:
        status, _, body = self.ask(name, path, **order).communicate(timeout=patient(READY_S))[0].partition(" ")
        return int(status), body

    def until(self, goal: str, fulfilled: Callable[[], bool]) -> None:
        def look() -> bool:
            for name, process in self._started.items():
                assert process.poll() is None, self.log(name)
            return fulfilled()

        wait_until(look, READY_S, goal, poll_s=1.0)

    def passes(self, name: str, kind: str, probe: str) -> bool:
        """Whether the kubelet's probe would pass."""
        get = CONTAINERS[kind][probe]["httpGet"]
        return self.answer(name, get["path"], port=get["port"], secret="")[0] == 200

    def terminate(self, name: str) -> subprocess.Popen[bytes]:
        """SIGTERM to the first process of the container, as the kubelet sends it."""
        unshared = next(
            one
            for one in psutil.Process(self._started[name].pid).children(recursive=True)
            if one.uids().real == int(IMAGE.last("USER").rest.split(":")[0])
        )
        os.kill(unshared.pid, signal.SIGTERM)
        return self._started.pop(name)

    def kill(self) -> None:
        for process in self._started.values():
            process.kill()
            process.wait()


@pytest.fixture
def pods(image: Path, tmp_path: Path) -> Iterator[Pods]:
    requires("test hosts")
    with rack(
        ("head", "one", "two"), seen=[image.parent, ROOT, Path(sys.prefix), tmp_path], environment={"LANG": "C.UTF-8"}
    ) as hosts:
        made = Pods(hosts, image, tmp_path)
        try:
            yield made
        finally:
            made.kill()


def configuration() -> dict[str, Any]:
    """The manifest's, with a simulated model, a key of ours, and the store and the files on the head itself."""
    config: dict[str, Any] = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
    args = config["applications"][0]["args"]
    replicas = {"min_replicas": 2, "max_replicas": 2}
    simulated = {"engine": "simulated", "cpus_per_rank": 1, "simulated": {"decode_step_s": 0.02}}
    args["models"] = [{"name": "sim", "replicas": replicas, **simulated}]
    args["router"] = {"replicas": 2, "cpus": 0.5}
    del args["store"], args["batch"]
    args["auth"]["keys"][0]["key_sha256"] = hashlib.sha256(KEY.encode()).hexdigest()
    return config


@pytest.mark.long
def test_a_worker_pod_that_ends_costs_no_stream_and_no_request(pods: Pods) -> None:
    pods.start("head", "head", GENERATED.format(role="--head") + "--dashboard-host=0.0.0.0 --num-cpus=0")
    pods.until("the head's probe", lambda: pods.passes("head", "head", "readinessProbe"))
    assert pods.passes("head", "head", "livenessProbe")
    for name in ("one", "two"):
        pods.start(
            name, "worker", GENERATED.format(role=f"--address={pods.hosts['head'].address}:6379") + "--num-cpus=4"
        )
    pods.until("the workers", lambda: all(pods.passes(name, "worker", "livenessProbe") for name in ("one", "two")))
    deploy = {"port": 8265, "body": configuration(), "put": True}
    assert pods.answer("head", "/api/serve/applications/", secret="", **deploy)[0] == 401
    assert pods.answer("head", "/api/serve/applications/", secret=TOKEN, **deploy)[0] == 200
    pods.until("replicas", lambda: all(pods.passes(name, "worker", "readinessProbe") for name in ("one", "two")))
    request = {"model": "sim", "prompt": "x", "max_tokens": 1000, "stream": True}  # 20 s
    streams = [pods.ask(name, "/v1/completions", body=request) for name in ("one", "two") for _ in range(STREAMS)]
    time.sleep(5)  # they are under way: first tokens come within 0.1 s
    ending = pods.terminate("two")
    seen = []

    def has_drained() -> bool:
        seen.append(pods.answer("one", "/v1/completions", body={"model": "sim", "prompt": "x", "max_tokens": 4})[0])
        return ending.poll() is not None

    took = wait_until(has_drained, DRAINED_S, "the worker has drained", seen=lambda: pods.log("two"))
    print(f"drained in {took.wall_s:.0f} s, {len(seen)} requests meanwhile", flush=True)
    assert ending.returncode == 0
    assert pods.log("two").endswith("drained\n")
    assert set(seen) == {200}
    ends = [stream.communicate(timeout=patient(READY_S))[0] for stream in streams]
    assert [end.startswith("200") and end.rstrip().endswith("[DONE]") and '"error"' not in end for end in ends] == (
        [True] * 2 * STREAMS
    )
    assert pods.terminate("head").wait(patient(READY_S)) == 0
