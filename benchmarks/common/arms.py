"""The servers under measurement: vLLM's own, and this stack. Each is started, found ready, and taken down by its pids.

Invariant: both get the same model, sizes, dtype and engine environment; after `stop` no process of the arm is left.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml

from benchmarks.common.child import ends_with_us
from benchmarks.common.processes import ENGINE_CORE, INSTANCE_VARIABLE, alive, family, role_of, title_of
from serve_app.engine.start import environment
from serve_app.settings import DEFAULT_MAX_AUDIO_S, DEFAULT_MAX_IMAGE_PIXELS

OURS = "ours"
VLLM = "vllm"
LITELLM = "litellm"  # a proxy before another arm; see `benchmarks.endpoint.compare`
READY_PATHS = {OURS: "/ready", VLLM: "/health", LITELLM: "/health/liveliness"}
KINDS = (OURS, VLLM)
HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]  # children find `benchmarks` and `serve_app` here
START_TIMEOUT_S = 240.0  # Ray, Serve and an engine take about a minute on two idle cores; busy ones several times that
GONE_POLL_S = 0.2  # of an end; nothing is being measured then
POLL_S = 1.0  # of a start: fine enough to lose no time, coarse enough not to slow the start by asking
TERM_TIMEOUT_S = 60.0  # a clean stop takes seconds; Serve may take longer over its replicas
KILL_TIMEOUT_S = 10.0  # after SIGKILL only the kernel is left to wait for
HTTP_TIMEOUT_S = 10.0  # of one readiness question
LOG_TAIL_CHARS = 4000  # of a server's log, when it fails
STATE_VARIABLE = "SERVE_APP_STATE"  # where `serve-app` records instances: ours go into the benchmark's own folder
ENGINE_VARIABLES = ("VLLM_", "OMP_", "KMP_")  # prefixes of what changes an engine's speed


class BenchmarkError(Exception):
    """The benchmark cannot give a figure: a server did not start, or answers were wrong."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What both arms serve. `kv_cache_bytes` per rank."""

    path: str
    name: str = "tiny"
    dtype: str = "float32"
    max_model_len: int = 2048
    max_num_seqs: int = 64
    kv_cache_bytes: int = 2**29
    tensor_parallel_size: int = 1
    replicas: int = 1  # of this stack


@dataclass(slots=True)
class Arm:
    """A running server. `instance` marks processes that have left the tree below `process`."""

    label: str
    kind: str
    port: int
    api_key: str
    process: subprocess.Popen[bytes]
    log: Path
    instance: str | None
    stop_signal: signal.Signals
    start_s: float = 0.0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def members(self) -> dict[int, psutil.Process]:
        """Every process of this arm by pid."""
        return family(self.process.pid, self.instance)

    def engine_placement(self) -> dict[str, Any]:
        """Cores, niceness and threads of EngineCore: evidence that the arms run their engines alike (vLLM's process
        title hides its environment from `/proc`)."""
        engines = [one for pid, one in self.members().items() if role_of(title_of(pid)) == ENGINE_CORE]
        return {
            "processes": len(engines),
            "cores": sorted(set().union(*(one.cpu_affinity() for one in engines))),
            "nice": sorted({one.nice() for one in engines}),
            "threads": sum(one.num_threads() for one in engines),
        }

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL_CHARS:]

    def stop(self) -> None:
        """Ask the root to stop, wait, then end by pid whatever of the arm is left.

        Raises:
            BenchmarkError: something of it outlives that.
        """
        members = self.members()
        if self.process.poll() is None:
            self.process.send_signal(self.stop_signal)
        for pid in self._wait_until_gone(members, TERM_TIMEOUT_S):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it went by itself in this instant
        if left := self._wait_until_gone(members, KILL_TIMEOUT_S):
            raise BenchmarkError(f"{self.label}: processes outlive SIGKILL: {sorted(left)}")

    def _wait_until_gone(self, members: dict[int, psutil.Process], timeout_s: float) -> set[int]:
        """The pids still there when the time is over; a child that was born late is waited for as well."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.process.poll()  # reaps the root
            left = alive((self.members() | members).values())
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(GONE_POLL_S)


def engine_environment(model: ModelChoice) -> dict[str, str]:
    """The environment this stack gives its engines here; the baseline is started with the same."""
    settings = environment.common_environment(model.max_num_seqs, DEFAULT_MAX_IMAGE_PIXELS, DEFAULT_MAX_AUDIO_S)
    if environment.platform() == "cpu":
        settings |= environment.cpu_environment(sorted(os.sched_getaffinity(0)), model.tensor_parallel_size)
    return settings


def free_port() -> int:
    """A TCP port free on loopback at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def spawn(command: Sequence[str], variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A server in a session of its own (Ctrl-C reaches only us), its output in `log`.

    Engine settings that happen to be in our environment are not passed on: the arms would take them differently.
    """
    base = {name: value for name, value in os.environ.items() if not name.startswith(ENGINE_VARIABLES)}
    with log.open("wb") as output:
        return subprocess.Popen(  # the caller's `stop` reaps it
            [*ends_with_us(signal.SIGTERM), *command],
            cwd=ROOT,
            env=base | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def start(
    label: str,
    model: ModelChoice,
    folder: Path,
    vllm_arguments: Sequence[str] = (),
    *,
    keys: Sequence[Mapping[str, Any]] = (),
    admission: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> Arm:
    """Start an arm and return when it answers. A label is a kind, or a kind with a suffix ("vllm#2").

    Args:
        keys: further ones of this stack, and `admission` its line, as in its configuration file; vLLM has neither.
        environment: of this arm, over what both get.
        timeout_s: of the start.

    Raises:
        BenchmarkError: it ended or did not answer in time; carries the end of its log.
    """
    began = time.monotonic()
    kind = label.partition("#")[0]
    if kind == VLLM:
        arm = _spawn_vllm(label, model, folder, vllm_arguments, environment or {})
    else:
        arm = _spawn_ours(label, model, folder, keys, admission or {}, environment or {})
    try:
        await_ready(arm, timeout_s)
    except BaseException:
        arm.stop()
        raise
    arm.start_s = time.monotonic() - began
    return arm


def _spawn_vllm(
    label: str, model: ModelChoice, folder: Path, extra: Sequence[str], environment: Mapping[str, str]
) -> Arm:
    port = free_port()
    key = secrets.token_hex(16)
    log = folder / f"{label}.log"
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--host", HOST, "--port", str(port)]
    command += ["--model", model.path, "--served-model-name", model.name, "--dtype", model.dtype]
    command += ["--max-model-len", str(model.max_model_len), "--max-num-seqs", str(model.max_num_seqs)]
    command += ["--kv-cache-memory-bytes", str(model.kv_cache_bytes), "--enable-prefix-caching"]
    command += ["--tensor-parallel-size", str(model.tensor_parallel_size)]
    command += ["--disable-uvicorn-access-log", *extra]
    # In the environment the key does what --api-key does, and is not on a command line that every user can read.
    process = spawn(command, engine_environment(model) | {"VLLM_API_KEY": key, **environment}, log)
    return Arm(label, VLLM, port, key, process, log, None, signal.SIGTERM)


def our_settings(
    model: ModelChoice,
    key: str,
    keys: Sequence[Mapping[str, Any]] = (),
    admission: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The configuration file of this stack for the same model; everything unnamed is the default users get. `key` is an
    operator's."""
    served = {
        "name": model.name,
        "path": model.path,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "max_num_seqs": model.max_num_seqs,
        "kv_cache_gb": model.kv_cache_bytes / 10**9,
        "tensor_parallel_size": model.tensor_parallel_size,
        "replicas": {"min_replicas": model.replicas, "max_replicas": model.replicas},
    }
    return {
        "models": [served],
        "auth": {"keys": [{"key": key, "admin": True}, *map(dict, keys)]},
        "admission": dict(admission or {}),
        "batch": {"workers": 0},
    }


def _spawn_ours(
    label: str,
    model: ModelChoice,
    folder: Path,
    keys: Sequence[Mapping[str, Any]],
    admission: Mapping[str, Any],
    environment: Mapping[str, str],
) -> Arm:
    port = free_port()
    key = secrets.token_hex(16)
    log = folder / f"{label}.log"
    instance = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
    config = folder / f"{instance}.yaml"
    config.touch(mode=0o600)  # it holds the key
    config.write_text(yaml.safe_dump(our_settings(model, key, keys, admission)))
    command = [sys.executable, "-m", "serve_app.cli", "up", "--config", str(config)]
    command += ["--port", str(port), "--instance", instance]
    process = spawn(command, {INSTANCE_VARIABLE: instance, STATE_VARIABLE: str(folder), **environment}, log)
    return Arm(label, OURS, port, key, process, log, instance, signal.SIGINT)


def await_ready(arm: Arm, timeout_s: float = START_TIMEOUT_S) -> None:
    """Return when an arm answers. BenchmarkError: it ended or did not answer in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if arm.process.poll() is not None:
            raise BenchmarkError(f"{arm.label} ended with {arm.process.returncode} at start:\n{arm.log_tail()}")
        if _is_ready(arm):
            return
        time.sleep(POLL_S)
    raise BenchmarkError(f"{arm.label} was not ready after {timeout_s:g} s:\n{arm.log_tail()}")


def _is_ready(arm: Arm) -> bool:
    if arm.kind == OURS:
        status = our_status(arm)
        if status is None:
            return False
        arm.port = int(str(status["url"]).rstrip("/").rpartition(":")[2])
    try:
        return get(arm, READY_PATHS[arm.kind])[0] == 200
    except requests.RequestException:
        return False


def our_status(arm: Arm) -> dict[str, Any] | None:
    """What `serve-app status --json` says, once it says a URL."""
    command = [sys.executable, "-m", "serve_app.cli", "status", "--json", "--instance", str(arm.instance)]
    variables = {**os.environ, STATE_VARIABLE: str(arm.log.parent)}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
    )
    try:
        status = json.loads(done.stdout)
    except ValueError:
        return None
    return status if isinstance(status, dict) and status.get("url") else None


def session(arm: Arm) -> requests.Session:
    """One that sends the arm's key, and takes no proxy of the user's."""
    made = requests.Session()
    made.trust_env = False
    made.headers["authorization"] = f"Bearer {arm.api_key}"
    return made


def get(arm: Arm, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Status and body of one request to an arm; POST when there is a body. Raises RequestException where it does not
    listen."""
    with session(arm) as http:
        answer = http.request("POST" if body else "GET", f"{arm.url}{path}", json=body, timeout=HTTP_TIMEOUT_S)
    return answer.status_code, answer.content


def greedy_answer(arm: Arm, model: ModelChoice, prompt: str, max_tokens: int) -> str:
    """The text of one greedy completion, to see that two arms serve the same model.

    Raises:
        BenchmarkError: any status but 200.
    """
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model.name, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    status, answer = get(arm, "/v1/chat/completions", body)
    if status != 200:
        raise BenchmarkError(f"{arm.label} answered {status}: {answer[:500]!r}")
    return str(json.loads(answer)["choices"][0]["message"]["content"])
