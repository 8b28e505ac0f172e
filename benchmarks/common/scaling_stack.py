"""The stack that `benchmarks.scaling` measures, and its clients.

Invariant: after the block nothing of the stack is left; every request a client made is counted as answered or failed.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.arms import BenchmarkError
from serve_app.cluster.local import LocalCluster, RemoteDriver
from serve_app.settings import application, parse

MODEL = "tiny"
LOGICAL_CPUS = 8  # for Ray's placement: one for each engine, however few cores the machine has
UP_TIMEOUT_S = 240.0  # as in `benchmarks.common.arms`
DEPLOY_S = 240.0  # an engine starts beside a busy one on the same cores
DRIVER_END_S = 40.0  # above the driver's own bound for ending Serve
REQUEST_TIMEOUT_S = 300.0  # engines start beside the one that answers, on the same cores
WORK_POLL_S = 0.1  # a look at the engines' own figures costs a router and each engine about a millisecond
TICK_S = 0.25


@dataclass(slots=True)
class Stage:
    """A running stack."""

    cluster: LocalCluster
    key: str

    def get(self, path: str) -> requests.Response:
        return requests.get(f"{self.cluster.url}{path}", headers=self._headers(), timeout=REQUEST_TIMEOUT_S)

    def ask(self, tokens: int, *, stream: bool = False, on_token: Callable[[], None] = lambda: None) -> str | None:
        """One answer of exactly that many tokens, over a connection of its own: HAProxy spreads those over routers.
        Returns how it failed; `on_token` is called with each piece that brings a token or an answer."""
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True}
        headers = self._headers() | {"Connection": "close"}
        url = f"{self.cluster.url}/v1/completions"
        try:
            with requests.post(
                url, json=body | {"stream": stream}, headers=headers, stream=True, timeout=REQUEST_TIMEOUT_S
            ) as answer:
                lines = []
                for line in answer.iter_lines():
                    if line and answer.status_code == 200 and not line.startswith(b":"):
                        on_token()
                    lines.append(line)
        except requests.RequestException as error:
            return f"{type(error).__name__}: {error}"
        text = b"\n".join(lines).decode(errors="replace").strip()
        whole = answer.status_code == 200 and (not stream or text.endswith("data: [DONE]"))
        return None if whole else f"{answer.status_code} {text[-300:]}"

    def working(self) -> frozenset[str]:
        """Engine replicas that run something, by their own figures: whichever router answers has asked each of them."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        return frozenset(
            sample.labels["replica"]
            for family in families
            for sample in family.samples
            if sample.name == "serve_app_engine_running_sequences" and sample.value > 0
        )

    def entry(self, config: Mapping[str, Any], keys: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """The application of a configuration, with the stage's own key, which is an operator's, and these."""
        return _entry(config, self.key, keys)

    def declare(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Declare an application as `serve-app deploy` does, and wait for it; what fails is rolled back. Returns the
        last state. BenchmarkError: it was not declared."""
        order = {
            "do": "declare",
            "environment": self.cluster.environment(),
            "application": entry,
            "serve": self.cluster.instance.serve_options(),
            "wait": True,
            "roll_back": True,
            "models": [MODEL],
        }
        remote = RemoteDriver(order)
        last = dict[str, Any]()
        deadline = time.monotonic() + DEPLOY_S
        try:
            while (event := remote.event(max(0.0, deadline - time.monotonic()))) is not None:
                if event["event"] == "error":
                    raise BenchmarkError(str(event["message"]))
                if event["event"] == "end":
                    break
                last = event
        finally:
            remote.close()
        return last

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


@contextmanager
def stack(
    config: dict[str, Any],
    keys: Sequence[Mapping[str, Any]] = (),
    environment: Mapping[str, str] | None = None,
    logs: Path | None = None,
    cpus: int = LOGICAL_CPUS,
) -> Iterator[Stage]:
    """A stack of the block's own, ready for requests.

    Args:
        keys: further ones beside the stage's own, which is an operator's.
        environment: goes before what the node has by itself.
        logs: the folder in which its logs are kept; None: they are not.
        cpus: for Ray's placement.

    Raises:
        BenchmarkError: it does not come up.
    """
    key = f"sk-{secrets.token_urlsafe(24)}"
    entry = _entry(config, key, keys)
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        cluster = LocalCluster.start(
            "scaling", num_cpus=cpus, state_dir=folder, models=[MODEL], extra_environment=environment
        )
        driver: RemoteDriver | None = None
        try:
            log = Path(folder) / "driver.log"
            driver = RemoteDriver(cluster.serve_order(entry), log=log)
            stage = Stage(cluster, key)
            _wait_ready(stage, driver, log)
            yield stage
        finally:
            if driver is not None:
                driver.send({"do": "shutdown"})
                driver.wait(DRIVER_END_S)
                driver.close()
            cluster.stop()
            if logs is not None:
                shutil.copytree(next(Path(folder).rglob("logs")), logs, dirs_exist_ok=True)


def _entry(config: Mapping[str, Any], key: str, keys: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ours = {"auth": {"keys": [{"key": key, "admin": True}, *map(dict, keys)]}}
    return application(parse({"batch": {"workers": 0}} | dict(config) | ours).without_secrets())


def _wait_ready(stage: Stage, driver: RemoteDriver, log: Path) -> None:
    deadline = time.monotonic() + UP_TIMEOUT_S
    last = "nothing"
    while time.monotonic() < deadline:
        event = driver.event(TICK_S)
        last = last if event is None else str(event)
        if event is not None and (event["event"] in ("error", "end") or event.get("state") == "failed"):
            break
        if event is not None and event.get("state") == "running" and _ready(stage):
            return
    raise BenchmarkError(f"the stack did not start; last seen: {last}\n{log.read_text(errors='replace')[-2000:]}")


def _ready(stage: Stage) -> bool:
    try:
        return stage.get("/ready").status_code == 200
    except requests.ConnectionError:
        return False  # HAProxy does not listen yet


@dataclass(slots=True)
class Clients:
    """Clients that ask again as soon as they have an answer. `failures` says how each failed request ended, `at` when
    tokens came.

    Args:
        has_streams: every second one asks for streams.
    """

    stage: Stage
    count: int
    tokens: int
    has_streams: bool = False
    at: list[float] = field(default_factory=list)
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> float:
        """Start them all; returns the moment before the first."""
        began = time.monotonic()
        self._threads = [
            threading.Thread(target=self._run, args=(self.has_streams and bool(number % 2),), daemon=True)
            for number in range(self.count)
        ]
        for thread in self._threads:
            thread.start()
        return began

    def finish(self) -> float:
        """Let each end its present request; returns the moment after the last."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return time.monotonic()

    def once(self) -> float:
        """Start them for one request each; returns the moment before the first."""
        self._stop.set()
        return self.start()

    def _run(self, stream: bool) -> None:
        while True:
            failure = self.stage.ask(self.tokens, stream=stream, on_token=lambda: self.at.append(time.monotonic()))
            with self._lock:
                if failure is None:
                    self.answered += 1
                else:
                    self.failures.append(failure)
            if self._stop.is_set():
                return
