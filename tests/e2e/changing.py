"""A small cluster of our own whose configuration changes while it serves: simulated engines, and load that never ends.

Invariant: the load runs through every change, and a request of it that fails, whenever and however, fails the test.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import requests

from autoscaling import operations
from autoscaling.rollout import declare
from benchmarks.common.processes import title_of, titled
from serve_app.cluster.local import LocalCluster, driver
from serve_app.errors import Unavailable
from serve_app.names import APPLICATION, deployment_of
from serve_app.settings import application, parse
from serve_app.system import marked
from tests.waiting import patient, wait_until

KEY = "sk-changes-0123456789"
STEADY = "steady"  # the model that no test changes
OTHER = "other"  # the one they do
STEP_S = 0.01  # of the simulated engines, per token
SLOTS = 2  # of an engine: few enough to fill them
LOGICAL_CPUS = 8
CHANGED_S = 90.0  # a change is done in one to five seconds on two idle cores; others of the suite share them
REQUEST_S = 60.0  # no request here takes longer than CHANGED_S allows its model to be away
POLL_S = 0.05
STREAM_TOKENS = 40

Config = Mapping[str, Any]


def model(name: str, **changes: Any) -> dict[str, Any]:
    """The settings of a simulated model."""
    simulated = {"decode_step_s": STEP_S, "kv_cache_tokens": 65_536}
    return {"name": name, "engine": "simulated", "max_num_seqs": SLOTS, "cpus_per_rank": 0.5} | {
        "simulated": simulated,
        **changes,
    }


def configured(*models: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A configuration with the steady model, these and the load's key."""
    keys = [{"key": KEY, "admin": True}]
    return {"models": [model(STEADY), *models], "auth": {"keys": keys}, "batch": {"workers": 0}} | changes


@dataclasses.dataclass
class Answer:
    """What a request got: its status and body, the seconds it took, and whether a stream came to its end."""

    status: int
    text: str
    took_s: float

    @property
    def whole(self) -> bool:
        return self.status == 200 and ("data:" not in self.text or self.text.rstrip().endswith("data: [DONE]"))


class Endpoint:
    """Requests to the cluster's one address."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, key: str = KEY) -> requests.Response:
        return requests.get(f"{self.url}{path}", headers={"Authorization": f"Bearer {key}"}, timeout=patient(REQUEST_S))

    def ask(self, name: str, tokens: int = 3, *, key: str = KEY, **body: Any) -> Answer:
        """A completion by the model of this name."""
        began = time.monotonic()
        response = requests.post(
            f"{self.url}/v1/completions",
            headers={"Authorization": f"Bearer {key}"},
            json={"model": name, "prompt": "The river", "max_tokens": tokens, **body},
            timeout=patient(REQUEST_S),
        )
        return Answer(response.status_code, response.text, time.monotonic() - began)

    def ran(self, name: str, session: str) -> str:
        """The model that answers a request to this name, in this session."""
        headers = {"Authorization": f"Bearer {KEY}", "X-Session-Id": session}
        body = {"model": name, "prompt": "The river", "max_tokens": 3}
        response = requests.post(f"{self.url}/v1/completions", headers=headers, json=body, timeout=patient(REQUEST_S))
        assert response.status_code == 200, response.text
        return response.headers["x-serve-app-model"]

    def asking(self, name: str, tokens: int = 3, **more: Any) -> Asking:
        """The same in a thread of its own."""
        return Asking(lambda: self.ask(name, tokens, **more))

    @contextmanager
    def streaming(self, name: str, tokens: int) -> Iterator[Iterator[bytes]]:
        """A stream's events as they come; it is left with the block."""
        body = {"model": name, "prompt": "The river", "max_tokens": tokens, "stream": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        with requests.post(
            f"{self.url}/v1/completions", headers=headers, json=body, stream=True, timeout=patient(REQUEST_S)
        ) as response:
            assert response.status_code == 200, response.text
            yield (line for line in response.iter_lines() if line)

    def serves(self, name: str) -> bool:
        """Whether the model answers; not while the endpoint itself still opens."""
        try:
            return self.ask(name).status == 200
        except requests.RequestException:
            return False

    def figure(self, metric: str, **labels: str) -> float | None:
        """The sum of the samples of this name and these labels; None where there are none."""
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(f"{metric}{{")]
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted)]
        return sum(found) if found else None


class Asking(threading.Thread):
    """A request on its way."""

    def __init__(self, ask: Callable[[], Answer]) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self._answer: Answer | BaseException = RuntimeError("no answer yet")
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._ask()
        except Exception as error:  # noqa: BLE001 - told by `answer`
            self._answer = error

    def answer(self) -> Answer:
        """Its answer, waited for. Raises what the request raised."""
        self.join()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


class Load:
    """Two clients that ask one model, by default without a pause: one whole answers, one streams."""

    def __init__(self, endpoint: Endpoint, model_name: str = STEADY, pause_s: float = 0.0) -> None:
        self._endpoint = endpoint
        self._model = model_name
        self._pause_s = pause_s
        self._over = threading.Event()
        self.answered = 0
        self.failed: list[str] = []
        bodies: list[dict[str, Any]] = [{"tokens": 3}, {"tokens": STREAM_TOKENS, "stream": True}]
        self._threads = [threading.Thread(target=self._run, kwargs=body, daemon=True) for body in bodies]
        for thread in self._threads:
            thread.start()

    def _run(self, **body: Any) -> None:
        while not self._over.wait(self._pause_s):  # bound: the tests'
            try:
                answer = self._endpoint.ask(self._model, **body)
            except requests.RequestException as error:
                self.failed.append(repr(error))
                continue
            if answer.whole:
                self.answered += 1
            else:
                self.failed.append(f"{answer.status}: {answer.text[-300:]}")

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


class Place:
    """The cluster, what is declared to it, and the load on it."""

    def __init__(self, cluster: LocalCluster, pool: ProcessPoolExecutor) -> None:
        self.cluster = cluster
        self.endpoint = Endpoint(cluster.url)
        self.options = {
            "http_options": {"host": cluster.instance.host, "port": cluster.instance.http_port},
            "proxy_location": "HeadOnly",
        }
        self._pool = pool  # one process, the driver: pytest's own stays free of Ray

    def within(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of a module returns, run in a process that is in the cluster."""
        return self._pool.submit(work, *arguments).result()

    def declare(self, config: Config) -> None:
        """Hand the configuration in, as `serve-app deploy --no-wait` does."""
        entry = application(parse(config).without_secrets())
        self._pool.submit(declare, entry, **self.options).result()

    def status(self) -> dict[str, Any]:
        """As `serve-app status --json` has it."""
        return self._pool.submit(operations.application.application_status, []).result()

    def quota(self) -> dict[str, Any] | None:
        """As `serve-app quota --json` has it; None while the quota actor is away."""
        try:
            return self._pool.submit(operations.application.ask_quota, "figures").result()
        except Unavailable:
            return None

    def wait(self, condition: Callable[[dict[str, Any]], bool], goal: str) -> dict[str, Any]:
        """Look until the state is as wanted; returns it."""

        def look() -> dict[str, Any]:
            state = self.status()
            return state if condition(state) else {}

        return wait_until(look, CHANGED_S, goal, seen=self.status, poll_s=POLL_S).found

    def become(self, config: Config) -> None:
        """Declare it and wait until it runs, and nothing else any more."""
        self.declare(config)
        self.wait_running(config)

    def begin(self, config: Config) -> None:
        """The same, until all its models answer and all its routers and replicas have started."""
        self.become(config)
        self.wait_serving(*(one["name"] for one in config["models"]))
        self.wait_running(config)

    def wait_running(self, config: Config) -> None:
        """Its models and its routers, as many replicas of each as it names, all of them started, and no model more.

        Serve calls an application running while a policy's new replicas still start.
        """
        settings = parse(config)
        wanted = {one.name: one.replicas for one in settings.models}

        def runs(state: dict[str, Any]) -> bool:
            present = {one["name"]: len(one["replicas"]) for one in state["models"]}
            started = running(state)
            return (
                state["state"] == "running"
                and len(started["Router"]) == settings.router.replicas
                and present.keys() == wanted.keys()
                and all(
                    bounds.min_replicas <= len(started[name]) <= present[name] <= bounds.max_replicas
                    for name, bounds in wanted.items()
                )
            )

        self.wait(runs, f"running {sorted(wanted)}")

    def wait_serving(self, *names: str) -> None:
        """Until each of these models answers; the endpoint may be about to open."""
        serves = lambda: all(self.endpoint.serves(name) for name in names)  # noqa: E731
        wait_until(serves, CHANGED_S, f"{names} answer", poll_s=POLL_S)  # HAProxy takes a second or two to open

    def replicas(self, *names: str) -> dict[str, list[str]]:
        """Ids of the running replicas by model, those of the routers under `Router`; of these names, or of all."""
        return running(self.status(), names)

    def processes(self, deployment: str) -> list[int]:
        """Of the replicas of a deployment."""
        name = f"ray::ServeReplica:{APPLICATION}:{deployment}"
        return [pid for pid in self.cluster.pids() if title_of(pid) == name]

    def process(self, deployment: str) -> int:
        """Of the one replica of a deployment, as soon as former ones, which end in their own time, are gone."""

        def look() -> list[int]:
            found = self.processes(deployment)
            return found if len(found) == 1 else []

        seen = lambda: self.processes(deployment)  # noqa: E731
        (found,) = wait_until(look, CHANGED_S, f"one process of {deployment}", seen=seen, poll_s=POLL_S).found
        return found

    def loading(self, name: str) -> list[int]:
        """Processes of the model's engines that load."""
        return self.processes(f"{deployment_of(name)}.initialize_and_get_metadata")

    def kill_controller(self) -> None:
        (process,) = titled(self.cluster.pids(), "ray::ServeController")
        os.kill(process, signal.SIGKILL)

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """The engines of the model stand still for the block: what they have begun does not end."""
        processes = self.processes(deployment_of(name))
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                os.kill(process, signal.SIGCONT)


def running(state: Mapping[str, Any], names: Sequence[str] = ()) -> dict[str, list[str]]:
    """Ids of the running replicas in a state."""
    groups = {one["name"]: one["replicas"] for one in state["models"]} | {"Router": state["routers"]}
    return {
        name: sorted(replica["id"] for replica in replicas if replica["state"] == "RUNNING")
        for name, replicas in groups.items()
        if not names or name in names
    }


def sizes(state: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Replicas wanted, and replicas there are in any state, by model."""
    return {one["name"]: (one["target"], len(one["replicas"])) for one in state["models"]}


@contextmanager
def place(state_dir: Path, **options: Any) -> Iterator[Place]:
    """A cluster for the block, on which nothing is deployed yet; nothing of it is left after that.

    Args:
        options: for `LocalCluster.start`.
    """
    cluster = LocalCluster.start(f"changes-{os.getpid()}", num_cpus=LOGICAL_CPUS, state_dir=state_dir, **options)
    spawn = get_context("spawn")
    pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=driver.connect, initargs=(cluster.environment(),))
    try:
        yield Place(cluster, pool)
    finally:
        pool.shutdown()
        cluster.stop()
    left = marked(cluster.mark)
    assert not left, f"processes left behind: {left}"
