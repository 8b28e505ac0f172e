"""Log files: whose they are, their last and their new lines, and the lines about one request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.system import logs
from serve_app.system.logs import LogFilter, LogReader

REQUEST = "5d0c6f0e9c7b4f0f8a4f5f7d1c2b3a49"
FAILED = f"ERROR 2026-11-25 01:27:37,655 serve_app_Router r1 -- Request {REQUEST} failed inside the router"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The logs of a node with a router, two engine replicas, the quota actor and others that are not ours."""
    written = {
        "serve/replica_serve_app_Router_r1.log": f"INFO one\n{FAILED}\nTraceback ...\n  File x\nINFO two\n",
        "serve/replica_serve_app_engine-org--m_2_x1.log": "INFO engine ready\n",
        "serve/replica_other_engine-org--m_y9.log": "INFO theirs\n",
        "serve/controller_77.log": f"INFO controller {REQUEST}\n",
        "serve/proxy_127.0.0.1.log": "INFO proxy\n",
        "worker-aa-01000000-11.err": ":actor_name:ServeReplica:serve_app:engine-org--m_2\n:replica:x2\nboom\n",
        "worker-bb-01000000-12.err": ":job_id:01\n:actor_name:GpuMemoryQuota\nquota line\n",
        "worker-bc-01000000-12.err": ":job_id:01\n:actor_name:Deployer\ndeployment line\n",
        "worker-cc-01000000-13.err": ":job_id:01\n:actor_name:Trainer\ntheirs\n",
        "raylet.out": "not ours\n",
    }
    (tmp_path / "serve").mkdir()
    for number, (name, text) in enumerate(written.items()):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (number, number))
    return tmp_path


def read(folder: Path, lines: int = 100, **wanted: str) -> dict[tuple[str, str], list[str]]:
    return {
        (part.source, part.replica): list(part.lines)
        for part in LogReader(str(folder), LogFilter(**wanted)).last(lines)
    }


def test_each_file_has_its_source_and_replica_and_foreign_ones_are_left_out(folder: Path) -> None:
    assert list(read(folder)) == [
        ("router", "r1"),
        ("engine-org--m_2", "x1"),
        ("controller", ""),
        ("proxy", ""),
        ("engine-org--m_2", "x2"),
        ("quota", ""),
        ("deployment", ""),
    ]


def test_a_source_and_a_replica_restrict_the_files(folder: Path) -> None:
    assert read(folder, source="quota") == {("quota", ""): ["quota line"]}, "Ray's marks are left out"
    assert list(read(folder, source="engine-org--m_2", replica="x2")) == [("engine-org--m_2", "x2")]
    assert list(read(folder, replica="x")) == [("engine-org--m_2", "x1"), ("engine-org--m_2", "x2")]


def test_only_the_last_lines_are_given(folder: Path) -> None:
    assert read(folder, 1, source="router") == {("router", "r1"): ["INFO two"]}


def test_a_request_has_its_lines_and_their_traceback_of_routers_and_engines(folder: Path) -> None:
    assert read(folder, request=REQUEST) == {("router", "r1"): [FAILED, "Traceback ...", "  File x"]}


def test_a_record_that_begins_with_its_time_ends_the_one_before(folder: Path) -> None:
    at = "2026-11-25 01:27:37,655\t"
    named = f"{at}ERROR actor.py:1 -- Request {REQUEST} was ended"
    with (folder / "worker-bb-01000000-12.err").open("a") as file:
        file.write(f"{named}\nTraceback ...\n{at}INFO actor.py:2 -- Quota actor started\n")
    assert read(folder, request=REQUEST, source="quota") == {("quota", ""): [named, "Traceback ..."]}


def test_new_lines_come_whole_and_once_from_old_rotated_and_new_files(folder: Path) -> None:
    reader = LogReader(str(folder), LogFilter(source="router"))
    router = folder / "serve/replica_serve_app_Router_r1.log"
    reader.last(1)
    assert reader.new() == []
    with router.open("a") as file:
        file.write("three\nfo")
    assert [part.lines for part in reader.new()] == [("three",)]
    with router.open("a") as file:
        file.write("ur\n")
    assert [part.lines for part in reader.new()] == [("four",)]
    router.write_text("after the rotation\n")
    (folder / "serve/replica_serve_app_Router_r2.log").write_text("another\n")
    assert sorted(part.lines for part in reader.new()) == [("after the rotation",), ("another",)]


def test_of_a_large_file_only_the_end_is_read_from_a_whole_line_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 12)
    assert read(folder, source="router")[("router", "r1")] == ["INFO two"]


def test_of_much_that_is_new_only_the_end_is_read_from_a_whole_line_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = LogReader(str(folder), LogFilter(source="router"))
    reader.last(100)
    monkeypatch.setattr(logs, "MAX_BYTES", 12)
    with (folder / "serve/replica_serve_app_Router_r1.log").open("a") as file:
        file.write("INFO three, which is long\nINFO four\n")
    assert [part.lines for part in reader.new()] == [("INFO four",)]


def test_a_process_marks_the_file_that_has_its_standard_error(tmp_path: Path) -> None:
    with (tmp_path / "worker-dd.err").open("wb") as file:
        file.write(b":actor_name:ServeReplica:serve_app:engine-m\n")
        file.flush()
        code = "import sys; from serve_app.system import mark_log; mark_log('abc'); print('boom', file=sys.stderr)"
        subprocess.run([sys.executable, "-c", code], stderr=file, check=True)
    assert read(tmp_path, replica="abc") == {("engine-m", "abc"): ["boom"]}


def test_a_rotated_file_is_not_read_again_under_its_new_name(folder: Path) -> None:
    log = folder / "serve/replica_serve_app_Router_r1.log"
    reader = LogReader(str(folder), LogFilter(source="router"))
    reader.last(100)
    log.rename(log.with_name(f"{log.name}.1"))
    log.write_text("INFO after the rotation, longer than what had been read of the file that was there before it\n" * 9)
    (part,) = reader.new()
    assert len(part.lines) == 9


def test_what_a_client_sent_neither_moves_the_cursor_nor_makes_a_line_of_its_own(folder: Path) -> None:
    log = folder / "serve/replica_serve_app_Router_r1.log"
    log.write_text("INFO said \x1b[2J\u2028ERROR forged\x85\tend\n")
    assert read(folder, source="router")["router", "r1"] == ["INFO said \\x1b[2J\\u2028ERROR forged\\x85\tend"]
