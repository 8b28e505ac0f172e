"""The stack the end-to-end tests talk to: one shared instance of our own, or one that runs already.

Invariant: every test reaches the stack through its HTTP endpoint only; `cluster` is there for what cannot be seen
through it, the instance's ports and processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import openai
import requests

from serve_app.cluster.local import LocalCluster, RemoteDriver
from serve_app.engine import ensure_tiny_model
from serve_app.settings import application, parse
from serve_app.system import marked
from tests.waiting import patient, wait_until

TINY = "tiny"
SIMULATED = "tiny-sim"
PEOPLE_KEY = "sk-e2e-people-0123456789"
BATCH_KEY = "sk-e2e-batch-0123456789"
SIMULATED_SLOTS = 8  # one request with n=8 fills them all
MAX_QUEUED = 64  # a line that a test can fill with 65 small requests
TINY_SLOTS = 64
STEP_S = 0.005  # of the simulated engine, per token, on every machine

CONFIG: dict[str, Any] = {
    "models": [
        {
            "name": TINY,
            "path": "tiny",
            "dtype": "float32",
            "max_model_len": 2048,
            "tool_parser": "hermes",
            "max_num_seqs": TINY_SLOTS,
        },
        {
            "name": SIMULATED,
            "engine": "simulated",
            "max_num_seqs": SIMULATED_SLOTS,
            "max_model_len": 8192,  # 40 s of one request: longer than any test looks at it
            "simulated": {"decode_step_s": STEP_S, "kv_cache_tokens": 131_072},
        },
    ],
    "auth": {
        "keys": [
            {"key": PEOPLE_KEY, "tenant": "people", "max_class": "high", "admin": True},
            {"key": BATCH_KEY, "tenant": "batch", "max_class": "low", "default_class": "low"},
        ]
    },
    "admission": {"max_queued": MAX_QUEUED, "max_wait_s": 60.0},
    "batch": {"workers": 1},
}

LOGICAL_CPUS = 8  # for Ray's placement: one for each engine, however few cores the machine has
START_S = 300.0  # a minute on two idle cores; tests share the machine with others
READY_S = 5.0  # of a look whether it is ready
DRIVER_END_S = 30.0  # the driver's own bound for ending Serve is 20 s
TICK_S = 0.25
COMMAND_S = 60.0  # of a command that takes two seconds
REQUEST_TIMEOUT_S = 120.0  # no answer takes a tenth of that, even beside the others of the suite


@dataclass(frozen=True)
class Stack:
    """A running stack. `batch_key` and `cluster` are None where an external one does not have them; `config` is what
    our own was started with."""

    base_url: str
    api_key: str
    batch_key: str | None
    models: frozenset[str]
    cluster: LocalCluster | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def model_folder(self) -> Path:
        """The weights and tokenizer that the model `tiny` serves."""
        return ensure_tiny_model()

    def client(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        """The official SDK, without retries unless asked for."""
        given: dict[str, Any] = {"max_retries": 0, "timeout": patient(REQUEST_TIMEOUT_S)} | options
        return openai.OpenAI(base_url=f"{self.base_url}/v1", api_key=key or self.api_key, **given)

    def async_client(self, key: str | None = None, **options: Any) -> openai.AsyncOpenAI:
        given: dict[str, Any] = {"max_retries": 0, "timeout": patient(REQUEST_TIMEOUT_S)} | options
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key=key or self.api_key, **given)

    def headers(self, key: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {key or self.api_key}"}

    def get(self, path: str, **options: Any) -> requests.Response:
        return self._request("GET", path, options)

    def post(self, path: str, body: object = None, **options: Any) -> requests.Response:
        """POST of a JSON body, or of `data=` as it is."""
        if "data" not in options:
            options["json"] = body
        return self._request("POST", path, options)

    def command(self, *arguments: str, key: str, columns: int) -> str:
        """What `serve-app` prints for this key, asked by URL as from a laptop."""
        done = subprocess.run(
            [sys.executable, "-m", "serve_app.cli", *arguments, "--url", self.base_url],
            env=os.environ | {"SERVE_APP_API_KEY": key, "COLUMNS": str(columns)},
            capture_output=True,
            text=True,
            timeout=patient(COMMAND_S),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _request(self, method: str, path: str, options: Mapping[str, Any]) -> requests.Response:
        given = dict(options)
        headers = self.headers() | dict(given.pop("headers", {}))
        given.setdefault("timeout", patient(REQUEST_TIMEOUT_S))
        return requests.request(method, f"{self.base_url}{path}", headers=headers, **given)


def external() -> Stack | None:
    """The running stack that the environment names, if it does."""
    url = os.environ.get("SERVE_APP_E2E_URL")
    key = os.environ.get("SERVE_APP_E2E_KEY")
    if not url or not key:
        return None
    listing = requests.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=REQUEST_TIMEOUT_S)
    listing.raise_for_status()
    names = frozenset(card["id"] for card in listing.json()["data"])
    return Stack(url.rstrip("/"), key, os.environ.get("SERVE_APP_E2E_BATCH_KEY"), names)


@contextmanager
def running(config: Mapping[str, Any], name: str) -> Iterator[Stack]:
    """The stack that the environment names; else one of our own with this configuration, for the block."""
    target = external()
    if target is not None:
        yield target
        return
    with tempfile.TemporaryDirectory() as folder, own(Path(folder), config, name=name) as made:
        yield made


@contextmanager
def own(
    state_dir: Path,
    config: Mapping[str, Any] = MappingProxyType(CONFIG),
    name: str = "e2e",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Stack]:
    """A stack of our own for the block; nothing of it is left after that. By default with the keys of `CONFIG`
    and without a batch worker. `environment`: for its node, over ours."""
    config = {"auth": CONFIG["auth"], "batch": {"workers": 0}, **config}
    names = [model["name"] for model in config["models"]]
    cluster = LocalCluster.start(
        f"{name}-{os.getpid()}",
        num_cpus=LOGICAL_CPUS,
        state_dir=state_dir,
        models=names,
        extra_environment=environment,
    )
    driver: RemoteDriver | None = None
    try:
        driver = _deploy(cluster, config, names, state_dir / "driver.log")
        stack = Stack(cluster.url, PEOPLE_KEY, BATCH_KEY, frozenset(names), cluster, config)
        _wait_ready(stack, driver, state_dir / "driver.log")
        yield stack
    finally:
        if driver is not None:
            driver.send({"do": "shutdown"})
            driver.wait(patient(DRIVER_END_S))
            driver.close()
        cluster.stop()
    left = marked(cluster.mark)
    assert not left, f"processes left behind: {left}"
    assert not Path(cluster.instance.run_dir).exists(), f"{cluster.instance.run_dir} is left behind"


def _deploy(cluster: LocalCluster, config: Mapping[str, Any], names: list[str], log: Path) -> RemoteDriver:
    """Deploy from a child process: pytest's own stays free of Ray."""
    order = {
        "do": "serve",
        "environment": cluster.environment(),
        "application": application(parse(config).without_secrets()),
        "serve": {
            "http_options": {"host": cluster.instance.host, "port": cluster.instance.http_port},
            "proxy_location": "HeadOnly",
        },
        "name": "serve_app",
        "models": names,
    }
    return RemoteDriver(order, log=log)


def _wait_ready(stack: Stack, driver: RemoteDriver, log: Path) -> None:
    last: dict[str, Any] = {}

    def tail() -> str:
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""

    def is_ready() -> bool:
        event = driver.event(TICK_S)
        if event is not None:
            last.clear()
            last.update(event)
        if last.get("event") in ("error", "end") or last.get("state") == "failed":
            raise RuntimeError(f"the stack did not start; last seen: {last}\n{tail()}")
        return last.get("state") == "running" and _answers(stack)

    wait_until(is_ready, START_S, "the stack is ready", seen=lambda: f"{last}\n{tail()}")


def _answers(stack: Stack) -> bool:
    try:
        return stack.get("/ready", timeout=patient(READY_S)).status_code == 200
    except requests.RequestException:
        return False
