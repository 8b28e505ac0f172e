"""The commands of an operator against a running stack: `status` in a pipe, `logs` from files and by a node's reader."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli import logs
from serve_app.cli.commands import app
from serve_app.cli.deploy import Target
from serve_app.cluster.local import RemoteDriver
from serve_app.system import LogFilter, LogReader
from tests.e2e.stack import SIMULATED, TINY, Stack
from tests.requires import missing

COMMAND_S = 60.0  # of a command that takes two seconds
BUSY_PER_CORE = 3
STREAMS = 32
QUESTIONS = 3  # of each command
PROMPT = "heron-in-the-reeds-4711"  # in no log
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


@pytest.mark.long
def test_status_and_quota_answer_by_http_while_the_head_is_loaded(stack: Stack) -> None:
    """With more busy processes than cores and a full queue, every question is answered, and none goes to Ray."""
    with contextlib.ExitStack() as left:
        for _ in range(BUSY_PER_CORE * (os.cpu_count() or 1)):
            left.enter_context(busy())
        streams = left.enter_context(ThreadPoolExecutor(STREAMS))
        for _ in range(STREAMS):
            streams.submit(stack.post, "/v1/completions", {"model": TINY, "prompt": "The river", "max_tokens": 200})
        answers = [asked(stack, command) for command in ("status", "quota") * QUESTIONS]
    assert [one["state"] for one in answers[::2]] == ["running"] * QUESTIONS
    assert all(one["engines"] for one in answers[1::2])


def asked(stack: Stack, command: str) -> dict[str, Any]:
    """What `anywhere` prints, in this process: on the loaded machine Python alone would start for ten seconds."""
    arguments = [command, "--json", "--url", f"{stack.base_url}/v1"]
    with tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "SERVE_APP_API_KEY": stack.api_key, "RAY_ADDRESS": None}
        done = CliRunner().invoke(app, arguments, env=environment)
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """A process that takes a core for the block, as the head's other work would."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.long
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


@pytest.mark.long
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


def logs_folder(stack: Stack) -> Path:
    if stack.cluster is None:
        missing("the external stack is no instance of this machine")
    assert stack.cluster is not None
    return Path(stack.cluster.instance.run_dir, "ray/session_latest/logs").resolve()


def test_every_record_of_serve_s_processes_is_json_and_none_has_a_prompt(stack: Stack) -> None:
    statuses = set()
    for model in (TINY, SIMULATED):
        chat = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
        assert stack.post("/v1/chat/completions", chat).status_code == 200
        for wrong in ({"temperature": PROMPT}, {"tools": PROMPT}, {"response_format": {"type": PROMPT}}):
            statuses.add(stack.post("/v1/chat/completions", chat | wrong).status_code)
        statuses.add(stack.post("/v1/completions", {"model": model, "prompt": PROMPT * 2000}).status_code)
    assert statuses == {200, 400}, "what vLLM refuses, the simulated engine ignores"
    folder = logs_folder(stack)
    records = []
    for part in LogReader(str(folder), LogFilter()).last(100_000):
        lines = [line for line in part.lines if line.strip()]
        is_file_of_serve = Path(part.path).parent.name == "serve"
        records += [json.loads(line) for line in lines if is_file_of_serve or line.startswith('{"time"')]
    ours = [record for record in records if "time" in record]  # the others are of Serve alone
    assert {record["process"] for record in ours} >= {"router", "engine", "batch worker", "controller", "quota"}
    # the engines of other modules, which have added models to this stack, have written too
    assert {record["model"] for record in ours if record["process"] == "engine"} >= {TINY, SIMULATED}
    assert all(record["time"].endswith("+00:00") for record in ours)
    for path in folder.rglob("*"):
        assert not path.is_file() or PROMPT.encode() not in path.read_bytes(), path


def test_a_support_bundle_of_what_runs_has_every_part_and_no_key(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    printed = json.loads(run(stack, "support-bundle", "--output", str(path), "--key", stack.api_key, "--json"))
    assert printed == {"path": str(path), "missing": {}}
    with tarfile.open(path) as archive:
        files = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive.getmembers()}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert "serve_app_requests_total" in texts["metrics.txt"]
    assert {card["id"] for card in json.loads(texts["models.json"])["data"]} == {TINY, SIMULATED}
    assert json.loads(texts["status.json"])["state"] == "running"
    assert '"action": "deploy"' in texts["audit.jsonl"]
    assert any(name.startswith("logs/") and "Router" in name for name in texts)
    assert stack.cluster is not None
    token = stack.cluster.state.token_file.read_text()
    for name, text in texts.items():
        assert stack.api_key not in text, name
        assert token not in text, name
