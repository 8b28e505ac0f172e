"""What `serve-app check` says of a model at the hub, and `hf download` before a start, with the hub's real client."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine.tiny_model import ensure_tiny_model
from tests.fakes.hub import OTHER_TOKEN, TOKEN, Hub, files_of
from tests.fakes.until import until
from tests.requires import requires

requires("linux")

ROOT = Path(__file__).parents[2]
IDS = ("org/open", "org/absent", "org/private", "org/gated")
NOWHERE = "http://127.0.0.1:1"
SLOW = 100_000.0  # bytes a second: the weights of 10 MB need far longer than the test looks
END_S = 100.0  # of one command; two seconds on an idle core


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    files = files_of(ensure_tiny_model())
    repos = {"org/open": files, "org/private": files, "org/gated": files, "Qwen/Qwen3-8B": files}
    with Hub(repos, private=["org/private"], gated=["org/gated"]) as running:
        yield running


def checked(hub: Hub, home: Path, *ids: str, **environment: str) -> list[dict[str, Any]]:
    """The findings about the models themselves, by the command."""
    config = home / "my.yaml"
    config.write_text(json.dumps({"models": [{"name": name.replace("/", "-"), "path": name} for name in ids]}))
    done = subprocess.run(
        [sys.executable, "-m", "serve_app.cli", "check", str(config), "--json", "--state-dir", str(home)],
        env=hub.environment(home, **environment),
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    assert done.returncode == (2 if any(one["severity"] == "error" for one in findings) else 0), done.stderr
    return [one for one in findings if one["path"].endswith(".path")]


CASES: dict[str, tuple[dict[str, str], dict[int, str]]] = {
    "no token": ({}, {1: "no_such_model", 2: "no_such_model", 3: "gated"}),
    "a stranger's token": ({"HF_TOKEN": OTHER_TOKEN}, {1: "no_such_model", 2: "no_such_model", 3: "gated"}),
    "a member's token": ({"HF_TOKEN": TOKEN}, {1: "no_such_model"}),
    "no valid token": ({"HF_TOKEN": "hf_mistyped"}, dict.fromkeys(range(4), "wrong_token")),
    "offline": ({"HF_HUB_OFFLINE": "1"}, dict.fromkeys(range(4), "offline")),
    "no hub": ({"HF_ENDPOINT": NOWHERE}, dict.fromkeys(range(4), "hub_unreachable")),
}
# The command in one process for each environment, forked from one that has imported all but the hub's client, which
# reads its environment when it is imported: the imports take seconds.
FORKS = """
import json, os, sys
from serve_app.cli.commands import main
assert "huggingface_hub" not in sys.modules
for environment, output in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        try:
            os.environ.clear()
            os.environ.update(environment)
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
            sys.argv = ["serve-app", "check", *sys.argv[2:]]
            main()
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def answers(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the command prints of the same models, by case."""
    folder = tmp_path_factory.mktemp("check")
    config = folder / "my.yaml"
    config.write_text(json.dumps({"models": [{"name": name.replace("/", "-"), "path": name} for name in IDS]}))
    runs = [(hub.environment(folder / case, **CASES[case][0]), str(folder / f"{case}.json")) for case in CASES]
    arguments = (str(config), "--json", "--state-dir", str(folder))
    command = [sys.executable, "-c", FORKS, json.dumps(runs), *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=END_S, check=True)
    found = {case: json.loads((folder / f"{case}.json").read_text()) for case in CASES}
    for (case, answer), status in zip(found.items(), done.stdout.split(), strict=True):
        has_error = any(one["severity"] == "error" for one in answer["findings"])
        assert int(status) == (2 if has_error else 0), case
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_answer_of_the_hub_has_its_own_finding_without_the_token(
    answers: dict[str, dict[str, Any]], case: str
) -> None:
    environment, codes = CASES[case]
    found = {one["path"]: one["code"] for one in answers[case]["findings"] if one["path"].endswith(".path")}
    assert found == {f"models.{number}.path": code for number, code in codes.items()}
    assert environment.get("HF_TOKEN", TOKEN) not in json.dumps(answers[case])


@pytest.mark.long
def test_a_warmed_up_worker_needs_no_hub(hub: Hub, tmp_path: Path) -> None:
    """The command is the document's."""
    text = (ROOT / "docs/how-to/use-a-hub-and-caches.md").read_text()
    ((command, name),) = re.findall(r"^\$ (\.venv/bin/hf download ([\w/.-]+))$", text, re.MULTILINE)
    assert [one["code"] for one in checked(hub, tmp_path, name, HF_HUB_OFFLINE="1")] == ["offline"]
    done = subprocess.run(
        command.split(),
        cwd=ROOT,
        env=hub.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert checked(hub, tmp_path, name, HF_HUB_OFFLINE="1") == []


@pytest.mark.long
def test_a_broken_download_is_no_model_and_can_be_repeated(hub: Hub, tmp_path: Path) -> None:
    command = [f"{ROOT}/.venv/bin/hf", "download", "org/open"]
    environment = hub.environment(tmp_path)
    hub.bytes_per_s = SLOW
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        begun = until(lambda: bool(hub.downloads() and list(tmp_path.rglob("*.incomplete"))), END_S, "a download")
        asyncio.run(begun)
    finally:
        process.kill()
        process.wait()
        hub.bytes_per_s = None
    assert [one["code"] for one in checked(hub, tmp_path, "org/open", HF_HUB_OFFLINE="1")] == ["offline"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=END_S, check=False)
    assert done.returncode == 0, done.stderr
    assert checked(hub, tmp_path, "org/open", HF_HUB_OFFLINE="1") == []
