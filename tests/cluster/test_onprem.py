"""`deploy/onprem.yaml` executed by `make test-cluster`: Ray's own launcher, real SSH, a head and two workers.

The tests are one story on one cluster and run in this order. Its table is printed at the end.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import onprem_lab
from tests.cluster.hosts import Host, left_over
from tests.cluster.onprem_lab import DRIVER, GCS_PORT, HEAD, HTTP_PORT, KEY, REAL, SIMULATED, STATE_S, WORKERS, Lab
from tests.requires import requires
from tests.waiting import wait_until

pytestmark = pytest.mark.long

# for each model: a simulated answer takes 1.6 s
CLIENTS = 3
TOKENS = 80
BLIP_S = 4.0  # the kernel's next retransmission comes within 4 s more: no stream has to break
LOSS_KNOWN_S = 45.0  # a silent machine is lost after 31 s (LOST_MACHINE); with a loaded machine's delays
CUT_MORE_S = 10.0  # the cable stays out for so long after that
ANSWER_S = 240.0  # a request that waits for a new real engine, at the longest
BLIND_S = 12.0  # a router notices a silent channel within so long; requests it sent before may fail

# What stays on a host after `ray down`: Ray's session logs, the launcher's connections, torch's compile cache, and what
# vLLM leaves there when it is killed (2 KB in a file, 32 bytes in a semaphore).
MAY_STAY = re.compile(r"ray|ray-config-\w+|ray_ssh_\w+|torchinductor_\w+|vllm_dist_\w+|sem\.mp-\w+")


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    requires("test hosts")  # not at the top: a machine without them has to be able to collect this module
    requires("vllm")
    began = time.monotonic()
    with onprem_lab.lab() as found:
        yield found
        story = found.table()
    assert not left_over(os.getpid())
    plugins = request.config.pluginmanager
    reporter = plugins.get_plugin("terminalreporter")
    capture = plugins.get_plugin("capturemanager")
    assert reporter is not None
    assert capture is not None
    with capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        reporter.section("what was started, cut and counted")
        for line in [*story, f"{time.monotonic() - began:.0f} s in all"]:
            reporter.write_line(line)


def healthy(seen: dict[str, Any]) -> bool:
    replicas = [replica for group in seen["replicas"].values() for replica in group]
    running = seen["state"] == "running" and all(state == "RUNNING" for _, state, _ in replicas)
    return running and len(seen["nodes"]) == 1 + len(WORKERS)


def where(seen: dict[str, Any], deployment: str) -> list[str]:
    return sorted(address for _, _, address in seen["replicas"][deployment])


def answers(lab: Lab) -> list[dict[str, Any]]:
    """One plain and one streamed answer of each model, to the driver host."""
    models = ["--models", f"{SIMULATED},{REAL}", "--tokens", "8", "--once"]
    own = {"SERVE_APP_API_KEY": KEY, "PYTHONPATH": str(onprem_lab.ROOT)}
    command = [sys.executable, "-m", "tests.cluster.load", lab.url(), *models]
    done = lab.rack[DRIVER].run(*command, timeout_s=ANSWER_S, environment=own)
    assert done.returncode == 0, done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ray_up_starts_the_head_the_workers_and_the_application(lab: Lab) -> None:
    began = time.monotonic()
    made = lab.operator("deploy/node.sh", "token", timeout_s=onprem_lab.COMMAND_S)
    assert made.returncode == 0, made.stdout
    done = lab.ray("up", "-y", str(lab.file), timeout_s=onprem_lab.UP_S)
    assert done.returncode == 0, done.stdout[-4000:]
    with lab.watched() as watch:
        seen = watch.wait("a healthy cluster", healthy, STATE_S)
    lab.note("ray up", time.monotonic() - began, note="a head, 2 workers, 2 simulated engines TP=4, 1 vLLM, 2 routers")
    assert {lab.names[address] for address in seen["nodes"]} == {HEAD, *WORKERS}


def test_each_tensor_parallel_group_is_on_one_worker_and_no_engine_on_the_head(lab: Lab) -> None:
    with lab.watched() as watch:
        seen = watch.wait("a healthy cluster", healthy, STATE_S)
    workers = sorted(lab.rack[name].address for name in WORKERS)
    groups = sorted(group for group in seen["groups"] if len(group) == 4)
    assert groups == [[address] * 4 for address in workers]
    assert where(seen, f"engine-{SIMULATED}") == workers
    assert set(where(seen, f"engine-{REAL}")) < set(workers)


def test_the_token_is_everywhere_and_its_owners_alone(lab: Lab) -> None:
    tokens = set()
    for name in (DRIVER, HEAD, *WORKERS):
        file = lab.rack[name].home / ".ray" / "auth_token"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, name
        tokens.add(file.read_text())
    assert len(tokens) == 1
    assert len(tokens.pop()) == 64


def test_both_models_answer_the_driver_host(lab: Lab) -> None:
    found = answers(lab)
    assert [one["model"] for one in found] == [SIMULATED, SIMULATED, REAL, REAL]
    for plain, streamed in zip(found[::2], found[1::2], strict=True):
        assert plain["tokens"] == 8
        assert plain["text"].strip()
        assert streamed["outcome"] == "ok"
        assert streamed["pieces"] >= 2


ASK_WITHOUT_KEY = """
import sys, urllib.request, urllib.error
for url in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(urllib.request.Request(url + "/v1/models"), timeout=10).status)
    except urllib.error.HTTPError as error:
        print(error.code)
    except urllib.error.URLError as error:
        print(error.reason)
"""


def test_a_request_without_the_key_is_refused_by_every_machine(lab: Lab) -> None:
    machines = [lab.rack[name] for name in (HEAD, *WORKERS)]
    urls = [f"http://{host.address}:{HTTP_PORT}" for host in machines]
    routers = [
        f"http://{host.address}:{port}"
        for host in machines
        for port in sorted({int(one.rpartition(":")[2]) for one in host.listening()})
        if 30_000 <= port < 30_100 and port != HTTP_PORT
    ]
    assert len(routers) == 2, "router replicas listen beside HAProxy"
    done = lab.rack[DRIVER].run(sys.executable, "-c", ASK_WITHOUT_KEY, *urls, *routers, timeout_s=onprem_lab.COMMAND_S)
    assert done.stdout.split() == ["401"] * (len(urls) + len(routers))


CONNECT = "import ray; ray.init(address={address!r}, logging_level='error'); print('IN', len(ray.nodes()))"


@pytest.mark.parametrize(
    "given",
    [{}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}],
    ids=["without a token", "with a wrong one"],
)
def test_a_driver_without_the_clusters_token_is_refused(lab: Lab, given: dict[str, str]) -> None:
    head = lab.rack[HEAD]
    code = CONNECT.format(address=f"{head.address}:{GCS_PORT}")
    right = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(head.home / ".ray" / "auth_token")}

    def connect(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        # a home without the token, which Ray would find there by itself
        alone = environment | {"HOME": "/tmp"}
        return head.run(sys.executable, "-c", code, timeout_s=onprem_lab.COMMAND_S, environment=alone)

    refused = connect(given)
    assert refused.returncode != 0
    assert "IN" not in refused.stdout
    assert re.search(r"(?i)authenticat|token", refused.stdout), refused.stdout[-2000:]
    assert "IN 3" in connect(right).stdout


def worker_with_the_real_engine(lab: Lab, seen: dict[str, Any]) -> Host:
    (address,) = where(seen, f"engine-{REAL}")
    return lab.rack[lab.names[address]]


def test_a_short_cut_costs_nothing_but_time(lab: Lab) -> None:
    with lab.watched() as watch:
        before = watch.wait("a healthy cluster", healthy, STATE_S)
        host = worker_with_the_real_engine(lab, before)
        with lab.loaded(CLIENTS, TOKENS, ANSWER_S) as rows:
            time.sleep(3)  # streams of every client are under way
            lab.rack.cut(host.name)
            time.sleep(BLIP_S)  # the span under test: shorter than the loss of a node is known
            lab.rack.mend(host.name)
            time.sleep(10)  # what was held goes on: above the next retransmission, and answers after it
        after = watch.wait("a healthy cluster", healthy, STATE_S)
    lab.note(f"{host.name} cut for {BLIP_S:.0f} s", BLIP_S, rows, "no node lost, no replica replaced")
    assert after["nodes"] == before["nodes"]
    assert after["replicas"] == before["replicas"]
    outcomes, held, _ = onprem_lab.counted(rows)
    assert set(outcomes) == {"ok"}, [row for row in rows if row["outcome"] != "ok"]
    assert held > 0, "the cut was not noticed by any request"


def test_a_worker_that_is_cut_off_is_replaced_and_comes_back(lab: Lab) -> None:
    with lab.watched() as watch:
        before = watch.wait("a healthy cluster", healthy, STATE_S)
        host = worker_with_the_real_engine(lab, before)
        (other,) = (lab.rack[name] for name in WORKERS if name != host.name)
        with lab.loaded(CLIENTS, TOKENS, ANSWER_S) as rows:
            time.sleep(3)  # streams of every client are under way
            lab.rack.cut(host.name)
            cut = time.time()
            lost = watch.wait("the worker's loss", lambda seen: host.address not in seen["nodes"], LOSS_KNOWN_S)
            time.sleep(CUT_MORE_S)  # the span under test: longer than the loss is known
            lab.rack.mend(host.name)
            mended = time.time()
            back = watch.wait("the worker's return", lambda seen: host.address in seen["nodes"], STATE_S)
            after = watch.wait("a healthy cluster", healthy, STATE_S)
        changes = watch.seen
    placed = next(
        one["at"] for one in changes if one["at"] > cut and ["RUNNING", other.address] in running(one, f"engine-{REAL}")
    )
    lab.note(
        f"{host.name} cut for {mended - cut:.0f} s",
        after["at"] - cut,
        rows,
        f"lost after {lost['at'] - cut:.0f} s, {REAL} on {other.name} after {placed - cut:.0f} s, "
        f"back {back['at'] - mended:.0f} s after the cable, whole again {after['at'] - mended:.0f} s after it",
    )
    assert back["nodes"][host.address] != before["nodes"][host.address], "a lost node comes back as a new one"
    assert where(after, f"engine-{SIMULATED}") == sorted([host.address, other.address])
    assert where(after, f"engine-{REAL}") == [other.address]
    late = [row for row in rows if row["began"] > lost["at"] + BLIND_S]
    assert late
    assert {row["outcome"] for row in late} == {"ok"}, [row for row in late if row["outcome"] != "ok"]
    failed = [row for row in rows if row["outcome"] != "ok"]
    assert len(failed) <= 4 * CLIENTS, "more failed than were on the way when the cable was pulled"


def running(seen: dict[str, Any], deployment: str) -> list[list[str]]:
    return [[state, address] for _, state, address in seen["replicas"].get(deployment, [])]


def kill_gcs(lab: Lab) -> None:
    (pid,) = (pid for pid, line in lab.rack[HEAD].processes().items() if "/gcs_server " in line)
    os.kill(pid, signal.SIGKILL)


def seen_anew(lab: Lab) -> dict[str, Any]:
    """The healthy cluster, as drivers see it that come after the head's crash."""

    def look() -> dict[str, Any]:
        try:
            with lab.watched() as watch:
                return watch.wait("a healthy cluster", healthy, onprem_lab.COMMAND_S)
        except (AssertionError, subprocess.TimeoutExpired):  # it came too early, or its Ray was the old one
            return {}

    return wait_until(look, STATE_S, "a healthy cluster", poll_s=onprem_lab.TICK_S).found


def test_a_head_that_crashes_starts_again_with_its_workers_and_the_application(lab: Lab) -> None:
    kill_gcs(lab)
    began = time.monotonic()
    seen_anew(lab)
    found = answers(lab)
    lab.note("the head's GCS killed", time.monotonic() - began, found[1::2], "workers and application started again")
    assert [one["model"] for one in found] == [SIMULATED, SIMULATED, REAL, REAL]


def test_with_redis_a_head_that_crashes_costs_no_request_and_no_replica(lab: Lab) -> None:
    requires("redis-server")
    lab.start_redis()
    began = time.monotonic()
    done = lab.ray("up", "-y", str(lab.file_with_redis), timeout_s=onprem_lab.UP_S)
    assert done.returncode == 0, done.stdout[-4000:]
    lab.note("ray up again, with Redis", time.monotonic() - began)
    with lab.watched() as watch:
        before = watch.wait("a healthy cluster", healthy, STATE_S)
    worker = next(lab.names[address] for address in where(before, "routers"))
    with lab.loaded(CLIENTS, TOKENS, ANSWER_S, machine=worker) as rows:
        time.sleep(3)  # streams of every client are under way
        kill_gcs(lab)
        began = time.monotonic()
        after = seen_anew(lab)
    lab.note("the head's GCS killed, with Redis", time.monotonic() - began, rows, f"clients at {worker}")
    assert after["replicas"] == before["replicas"]
    assert {row["outcome"] for row in rows} == {"ok"}, [row for row in rows if row["outcome"] != "ok"]


def test_ray_down_leaves_nothing(lab: Lab) -> None:
    began = time.monotonic()
    done = lab.ray("down", "-y", str(lab.file), timeout_s=onprem_lab.DOWN_S)
    lab.end_redis()
    assert done.returncode == 0, done.stdout[-4000:]
    machines = [lab.rack[name] for name in (DRIVER, HEAD, *WORKERS)]
    left = lambda: {host.name: found for host in machines if (found := host.processes())}  # noqa: E731
    # the launcher's own SSH connections close after 10 s
    wait_until(left, onprem_lab.COMMAND_S, "processes on the hosts", wanted={}, poll_s=onprem_lab.TICK_S)
    lab.note("ray down", time.monotonic() - began, note="no process, no port, no folder")
    for host in machines:
        assert not host.listening(), host.name
        assert not stray_files(host), host.name


def stray_files(host: Host) -> list[str]:
    """What is in the host's /tmp and /dev/shm and need not be there."""
    names = host.run("ls", "-A", "/tmp", "/dev/shm", timeout_s=onprem_lab.COMMAND_S).stdout.split()
    seen = {path.parts[2] for path in map(Path, [str(onprem_lab.ROOT), sys.prefix]) if path.parts[1] == "tmp"}
    return [name for name in names if not name.endswith(":") and name not in seen and not MAY_STAY.fullmatch(name)]
