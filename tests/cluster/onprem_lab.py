"""The on-premises cluster on test hosts: `deploy/onprem.yaml` with the lab's addresses, launched by Ray's own launcher.

Only addresses, user, key, resources and the application's configuration are put into the file; its commands are its
own. The environment is there already (SERVE_APP_PYTHON), so `node.sh setup` installs nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.hosts import Host, Rack, rack
from tests.waiting import patient, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
DRIVER = "driver"
HEAD = "head"
WORKERS = ("worker1", "worker2")
# their defaults
HTTP_PORT = 8000
GCS_PORT = 6379
REDIS_PORT = 6379
REDIS_PASSWORD = "lab-0123456789"
KEY = "sk-lab-0123456789abcdef"
SIMULATED = "simulated"
REAL = "tiny"
# What a worker has: the four GPUs of one tensor-parallel group, a CPU for each of its ranks, for the real engine and
# for both routers, so that one worker can carry all but the other's group.
WORKER_RESOURCES = "--num-cpus=7 --num-gpus=4"
UP_S = 300.0  # 60 s on an idle machine with two cores: the head, two workers, a real engine
DOWN_S = 90.0  # 20 s on an idle machine
COMMAND_S = 60.0  # a command on a host: a driver connects in 3 s
STATE_S = 240.0  # for the cluster to heal: a node's start, a real engine's start
TICK_S = 0.2  # how often a state that is waited for is looked at

APPLICATION: dict[str, Any] = {
    "models": [
        {
            "name": SIMULATED,
            "engine": "simulated",
            "tensor_parallel_size": 4,
            "gpus_per_rank": 1,
            "replicas": {"min_replicas": 2, "max_replicas": 2},
            "max_num_seqs": 32,
            "max_model_len": 4096,
            "simulated": {"decode_step_s": 0.02, "kv_cache_tokens": 65_536},
        },
        {"name": REAL, "path": "tiny", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16},
    ],
    "auth": {"keys": [{"key": KEY, "tenant": "lab"}]},
    # requests of a lost real engine wait for the next one, which takes a minute on a loaded machine
    "admission": {"max_wait_s": 180, "no_replica_wait_s": 180},
    "router": {"replicas": 2, "cpus": 1},
    "quota": {"device_gb": 80},  # of GPUs that are only counted: there is no NVML to ask
}


def cluster_file(hosts: Rack, application: Path, *, redis: bool = False) -> dict[str, Any]:
    """`deploy/onprem.yaml` for the rack; with the head's state in the driver host's Redis, as the file says."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "onprem.yaml").read_text())
    config["provider"]["head_ip"] = hosts[HEAD].address
    config["provider"]["worker_ips"] = [hosts[name].address for name in WORKERS]
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.key)}
    config["file_mounts"]["~/serve-app.yaml"] = str(application)
    config["worker_start_ray_commands"] = [
        f"{command} {WORKER_RESOURCES}" for command in config["worker_start_ray_commands"]
    ]
    if redis:
        start, *rest = config["head_start_ray_commands"]
        state = f"RAY_REDIS_ADDRESS={hosts[DRIVER].address}:{REDIS_PORT} RAY_external_storage_namespace=lab"
        start = start.replace("~/serve-app/deploy/node.sh", f"{state} ~/serve-app/deploy/node.sh")
        start = start.replace("ray start", f"ray start --redis-password={REDIS_PASSWORD}")
        config["head_start_ray_commands"] = [start, *rest]
    return config


class Lines:
    """A program on a host that writes one JSON object a line, until its input is closed."""

    def __init__(self, host: Host, module: str, *arguments: str, environment: dict[str, str]) -> None:
        self.seen: list[dict[str, Any]] = []
        self._errors = host.folder / f"{module.rpartition('.')[2]}.err"
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                host.command(sys.executable, "-m", module, *arguments, environment=environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True, name=module)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.seen.append(json.loads(line))

    def wait(self, goal: str, fulfilled: Callable[[dict[str, Any]], bool], timeout_s: float) -> dict[str, Any]:
        """The newest object, once it fulfils the condition.

        Raises:
            AssertionError: it does not in time; names `what` and what was seen last.
        """

        def last() -> str:
            return json.dumps(self.seen[-1]) if self.seen else self._errors.read_text()[-2000:]

        def look() -> dict[str, Any]:
            if self.seen and fulfilled(self.seen[-1]):
                return self.seen[-1]
            assert self._process.poll() is None, f"the program has ended before {goal}; last: {last()}"
            return {}

        # the program tells its state line by line
        return wait_until(look, timeout_s, goal, seen=last, poll_s=TICK_S).found

    def close(self, timeout_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(patient(timeout_s))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._reader.join(patient(COMMAND_S))


@dataclasses.dataclass
class Row:
    """One line of the table at the end."""

    event: str
    took_s: float
    requests: Counter[str]
    held: int  # of those that came whole, how many were silent for longer than HELD_S
    longest_wait_s: float
    failures: Counter[str]
    note: str


ANY_NAME = re.compile(r"\b(?=\w*\d)(?=\w*[a-z])\w{8}\b")  # of a replica, in an error's text
HELD_S = 2.0  # an undisturbed first token comes within 0.1 s, on a loaded machine within one


def counted(rows: list[dict[str, Any]]) -> tuple[Counter[str], int, float]:
    """Outcomes, how many that came whole were held, and the longest silence of any of those."""
    waits = [row["silence_s"] for row in rows if row["outcome"] == "ok"]
    return Counter(row["outcome"] for row in rows), sum(wait > HELD_S for wait in waits), max(waits, default=0.0)


class Lab:
    """The rack, the cluster on it, and what was done to it."""

    def __init__(self, hosts: Rack) -> None:
        self.rack = hosts
        self.file = hosts.folder / "onprem.yaml"
        self.file_with_redis = hosts.folder / "onprem-redis.yaml"
        self.story: list[Row] = []
        self._redis: subprocess.Popen[bytes] | None = None
        application = hosts.folder / "application.yaml"
        application.write_text(yaml.safe_dump(APPLICATION))
        self.file.write_text(yaml.safe_dump(cluster_file(hosts, application)))
        self.file_with_redis.write_text(yaml.safe_dump(cluster_file(hosts, application, redis=True)))

    def url(self, name: str = HEAD) -> str:
        """The endpoint on one of the machines."""
        return f"http://{self.rack[name].address}:{HTTP_PORT}"

    @property
    def names(self) -> dict[str, str]:
        """Host names by address."""
        return {host.address: host.name for host in self.rack.hosts.values()}

    def note(self, event: str, took_s: float, rows: list[dict[str, Any]] | None = None, note: str = "") -> None:
        requests, held, longest_s = counted(rows or [])
        failed = [row for row in rows or [] if row["outcome"] != "ok"]
        failures = Counter(f"{row['model']} {row['outcome']}: {ANY_NAME.sub('...', row['detail'])}" for row in failed)
        self.story.append(Row(event, took_s, requests, held, longest_s, failures, note))

    def operator(self, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """A command as the operator gives it, in the checkout, on the driver host."""
        line = f'cd {ROOT} && exec "$@"'
        return self.rack[DRIVER].run("bash", "-c", line, "operator", *command, timeout_s=timeout_s)

    def ray(self, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        return self.operator(sys.executable, "-m", "ray.scripts.scripts", *command, timeout_s=timeout_s)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Lines]:
        """What a driver on the head sees; the first look is there when the block begins."""
        head = self.rack[HEAD]
        own = {
            "RAY_ADDRESS": f"{head.address}:{GCS_PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(head.home / ".ray" / "auth_token"),
            "PYTHONPATH": str(ROOT),
        }
        watch = Lines(head, "tests.cluster.inside", environment=own)
        try:
            watch.wait("the first look", lambda seen: True, COMMAND_S)
            yield watch
        finally:
            watch.close(COMMAND_S)

    @contextlib.contextmanager
    def loaded(self, clients: int, tokens: int, answer_s: float, machine: str = HEAD) -> Iterator[list[dict[str, Any]]]:
        """`clients` for each model ask `machine` from the driver host during the block; all their requests are there
        after it.

        Args:
            answer_s: the longest a request may take.
        """
        options = ["--models", f"{SIMULATED},{REAL}", "--clients", str(clients), "--tokens", str(tokens)]
        own = {"SERVE_APP_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
        load = Lines(self.rack[DRIVER], "tests.cluster.load", self.url(machine), *options, environment=own)
        try:
            load.wait("the first answer", lambda seen: True, COMMAND_S)
            yield load.seen
        finally:
            load.close(answer_s)

    def start_redis(self) -> None:
        """A Redis on the driver host, until `end_redis`; the rack's end ends it, too."""
        words = ["--port", str(REDIS_PORT), "--bind", "0.0.0.0", "--requirepass", REDIS_PASSWORD, "--save", ""]
        command = self.rack[DRIVER].command("redis-server", *words)
        self._redis = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def end_redis(self) -> None:
        if self._redis is not None:
            for pid, line in self.rack[DRIVER].processes().items():
                if line.startswith("redis-server"):  # what we started is nsenter, and its child is not ended with it
                    os.kill(pid, signal.SIGTERM)
            self._redis.wait(patient(COMMAND_S))

    def table(self) -> list[str]:
        """What was started, cut and counted."""
        head = ("what", "took", "ok", "refused", "cut", "broken", "held", "longest wait", "")
        lines: list[tuple[str, ...]] = [head]
        for row in self.story:
            count = [str(row.requests[word]) if row.requests else "" for word in ("ok", "refused", "cut", "broken")]
            held = [str(row.held), f"{row.longest_wait_s:.1f} s"] if row.requests else ["", ""]
            lines.append((row.event, f"{row.took_s:.0f} s", *count, *held, row.note))
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return [
            *table,
            *(f"{row.event}: {count} x {what}" for row in self.story for what, count in row.failures.items()),
        ]


@contextlib.contextmanager
def lab() -> Iterator[Lab]:
    """A lab for the block; nothing of it is left after that."""
    seen = {ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), Path(sys.executable).parent.parent}
    names = [DRIVER, HEAD, *WORKERS]
    with rack(names, seen=sorted(seen), environment={"SERVE_APP_PYTHON": sys.executable}) as hosts:
        yield Lab(hosts)
