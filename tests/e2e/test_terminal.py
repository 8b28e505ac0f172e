"""The commands of an operator against a running stack: `status` in a pipe, `logs` from files and by a node's reader."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta

from serve_app.cli import logs
from serve_app.cli.deploy import Target
from serve_app.cluster.local import RemoteDriver
from serve_app.system import LogFilter
from tests.e2e.stack import SIMULATED, TINY, Stack
from tests.requires import missing

COMMAND_S = 60.0  # of a command that takes two seconds
PHASES = ("environment", "loading", "memory", "warm-up")  # of any engine; others depend on device and settings


def run(stack: Stack, *arguments: str) -> str:
    """The standard output of a command for the stack's instance, with its state folder."""
    if stack.cluster is None:
        missing("the external stack is no instance of this machine")
    assert stack.cluster is not None
    state = stack.cluster.state
    options = ["--instance", state.name, "--state-dir", str(state.folder.parent)]
    done = subprocess.run(
        [sys.executable, "-m", "serve_app.cli", *arguments, *options],
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_piped_status_has_a_line_for_each_replica_and_names_who_holds_cpus(stack: Stack) -> None:
    lines = [line.split("\t") for line in run(stack, "status").splitlines()]
    assert lines[0][2] == "running"
    assert {line[1]: line[3:5] for line in lines if line[0] == "model"} == {
        TINY: ["healthy", "1/1"],
        SIMULATED: ["healthy", "1/1"],
    }
    replicas = [line for line in lines if line[0] == "replica"]
    assert {(line[1], line[3], line[4]) for line in replicas} == {
        (TINY, "RUNNING", "127.0.0.1"),
        (SIMULATED, "RUNNING", "127.0.0.1"),
    }
    assert {(line[1], line[2]) for line in lines if line[0] == "holder"} >= {
        ("ours", f"engine-{TINY}"),
        ("ours", f"engine-{SIMULATED}"),
    }


def test_from_anywhere_an_operator_sees_the_same_by_http(stack: Stack) -> None:
    """Without Ray: neither the instance's state nor its token is at hand."""
    if stack.cluster is None:
        missing("the external stack is no instance of this machine")
    here = {line.split("\t")[2] for line in run(stack, "status").splitlines() if line.startswith("replica")}
    found = json.loads(anywhere(stack, "status"))
    assert found["state"] == "running"
    assert {one["id"] for model in found["models"] for one in model["replicas"]} == here
    ledger = json.loads(anywhere(stack, "quota"))
    assert {one["replica"] for one in ledger["engines"]} == here
    assert set(ledger["addresses"].values()) == {"127.0.0.1"}
    assert json.loads(anywhere(stack, "defrag", "--plan")) == {"plan": None, "begun": False} | {
        "addresses": ledger["addresses"]
    }
    (tiny,) = (one for model in found["models"] if model["name"] == TINY for one in model["replicas"])
    look = stack.get(f"/admin/drains/{tiny['id']}").json()
    assert (look["is_node"], look["engines"], look["rows"]) == (False, {tiny["id"]: "RUNNING"}, [])


def anywhere(stack: Stack, *arguments: str, status: tuple[int, ...] = (0,)) -> str:
    """The standard output of a command with URL and key alone."""
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-m", "serve_app.cli", *arguments, "--json", "--url", f"{stack.base_url}/v1"],
            env={"HOME": home, "PATH": os.environ["PATH"], "SERVE_APP_API_KEY": stack.api_key},
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    assert done.returncode in status, done.stderr
    return done.stdout


def test_a_driver_that_follows_what_runs_sees_it_and_changes_nothing(stack: Stack) -> None:
    if stack.cluster is None:
        missing("the external stack is no instance of this machine")
    assert stack.cluster is not None
    replicas = [line for line in run(stack, "status").splitlines() if line.startswith("replica")]
    with contextlib.closing(RemoteDriver(stack.cluster.watch_order())) as follower:
        event = follower.event(COMMAND_S)
    assert event is not None
    assert (event["event"], event["state"]) == ("status", "running")
    assert [line for line in run(stack, "status").splitlines() if line.startswith("replica")] == replicas


def test_the_logs_of_an_engine_tell_the_phases_of_its_start(stack: Stack) -> None:
    from_files = run(stack, "logs", TINY, "--lines", "1000")
    (ready,) = (line for line in from_files.splitlines() if f"Engine of model {TINY} is ready after" in line)
    found = re.findall(r"([a-z-]+) \d+\.\d s", ready.partition(" s")[2])
    assert [phase for phase in found if phase in PHASES] == list(PHASES), ready
    assert ready.startswith(f"engine-{TINY}\t")
    assert "slow __init__" not in run(stack, "logs", "controller", "--lines", "10000")

    assert stack.cluster is not None
    target = Target(stack.cluster.environment(), None)  # as of a cluster, whose nodes' files are elsewhere
    batches = logs.of_cluster(target, LogFilter(f"engine-{TINY}"), 1000, follow=False)
    time, written = ready.split("\t")[2:4]
    assert written in [found.line for batch in batches for found in batch]

    by_http = [json.loads(line) for line in anywhere(stack, "logs", TINY, "--lines", "1000").splitlines()]
    assert (time, written) in [(found["time"], found["line"]) for found in by_http]
    times = [found["time"] for found in by_http if found["time"] is not None]
    assert times == sorted(times)
    later = datetime.fromisoformat(time) + timedelta(milliseconds=1)
    since = anywhere(stack, "logs", TINY, "--since", later.isoformat(), "--level", "debug", status=(0, 1))
    assert written not in since
