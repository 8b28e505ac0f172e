"""The phases of a start: who says them, how far each is, and what the next start is compared with."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.core.memory import StartReport
from serve_app.engine.start.download_size import Download
from serve_app.engine.start.phases import PHASE_FILE, StartPhases, last_start_s, write_phase
from tests.fakes.until import SOON_S, until
from tests.requires import requires

GB = 10**9
MODEL = "org/a-model"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StartPhases]:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    monkeypatch.setenv(PHASE_FILE, "")
    return lambda **given: StartPhases(MODEL, tmp_path / "starts", clock, **given)


def test_a_start_goes_through_the_phases_that_vllms_processes_write(
    make: Callable[..., StartPhases], clock: Clock, tmp_path: Path
) -> None:
    phases = make(weights_bytes=10 * GB)
    assert phases.now(0) is None, "it waits for its memory"
    phases.begin()
    clock.now += 4
    assert phases.now(2 * GB) == StartReport("environment", 4.0)
    write_phase("loading", clock.now)
    assert phases.now(3 * GB) == StartReport("loading", 4.0, 0.0), "what it had before is not counted"
    clock.now += 2
    assert phases.now(8 * GB) == StartReport("loading", 6.0, 0.5)
    assert phases.now(20 * GB) == StartReport("loading", 6.0, 0.99), "not finished before the next phase"
    write_phase("warm-up", clock.now)
    assert phases.now(20 * GB) == StartReport("warm-up", 6.0)
    clock.now += 3
    assert phases.finish() == 9.0
    assert phases.seconds == {"environment": 4.0, "loading": 2.0, "warm-up": 3.0}
    assert phases.now(0) is None
    assert [one.name for one in tmp_path.iterdir()] == ["starts"], "the file is gone"
    write_phase("compile", clock.now)  # of a later compilation: nobody follows
    assert [one.name for one in tmp_path.iterdir()] == ["starts"]


def test_a_phase_that_nobody_saw_in_time_is_counted_all_the_same(
    make: Callable[..., StartPhases], clock: Clock
) -> None:
    phases = make()
    phases.begin()
    for phase, at in (("loading", 101.0), ("memory", 103.0), ("compile", 103.5), ("memory", 104.0)):
        write_phase(phase, at)
    clock.now = 106.0
    assert phases.finish() == 6.0
    assert phases.seconds == {"environment": 1.0, "loading": 2.0, "memory": 2.5, "compile": 0.5}


def test_the_next_start_is_informed_how_long_the_last_one_took(
    make: Callable[..., StartPhases], clock: Clock, tmp_path: Path
) -> None:
    first = make()
    first.begin()
    assert first.last_s is None
    clock.now += 31
    first.finish()
    second = make()
    second.begin()
    found = second.now(0)
    assert found is not None
    assert found.last_s == 31.0
    assert last_start_s(tmp_path / "starts", "another") is None


def test_a_broken_history_and_a_read_only_folder_cost_only_the_comparison(
    make: Callable[..., StartPhases], tmp_path: Path
) -> None:
    (tmp_path / "starts").write_text("no folder")
    phases = make()
    phases.begin()
    assert phases.last_s is None
    assert phases.finish() == 0.0


def test_unfinished_files_in_the_cache_are_a_download_with_its_bytes(
    make: Callable[..., StartPhases], clock: Clock, tmp_path: Path
) -> None:
    blobs = tmp_path / "models--org--a-model" / "blobs"
    blobs.mkdir(parents=True)
    phases = make(cache=blobs.parent)
    phases.begin()
    write_phase("loading", clock.now)
    (blobs / "one").write_bytes(b"1" * 30)
    (blobs / "two.incomplete").write_bytes(b"2" * 12)
    assert phases.now(0) == StartReport("downloading", 0.0, None, 42)
    (blobs / "two.incomplete").rename(blobs / "two")
    assert phases.now(0) == StartReport("loading", 0.0)


def test_of_a_download_the_hub_is_asked_for_the_whole_and_only_its_files_count(
    make: Callable[..., StartPhases], clock: Clock, tmp_path: Path
) -> None:
    blobs = tmp_path / "models--org--a-model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "old").write_bytes(b"0" * 500)  # of another revision
    answer = threading.Event()
    asked = []

    def ask_hub() -> Download:
        asked.append(threading.current_thread())
        assert answer.wait(SOON_S)
        return Download(2 * GB, frozenset({"one", "two"}))

    phases = make(cache=blobs.parent, ask_hub=ask_hub)
    phases.begin()
    write_phase("loading", clock.now)
    assert phases.now(0) == StartReport("loading", 0.0)
    assert asked == [], "nothing is downloaded"
    (blobs / "one").write_bytes(b"1" * 30)
    (blobs / "two.1234abcd.incomplete").write_bytes(b"2" * 7)  # of an attempt that was cut off
    (blobs / "two.5678abcd.incomplete").write_bytes(b"2" * 12)
    reported = phases.now(0)
    assert reported is not None
    assert (reported.phase, reported.done_bytes, reported.total_bytes) == ("downloading", 542, None), (
        "the hub has not answered"
    )
    answer.set()

    def whole() -> bool:
        received = phases.now(0)
        return received is not None and (received.done_bytes, received.total_bytes) == (42, 2 * GB)

    asyncio.run(until(whole, SOON_S, "the hub's answer is told"))
    assert len(asked) == 1
    assert asked[0] is not threading.current_thread()
    (blobs / "two.5678abcd.incomplete").rename(blobs / "two")
    assert phases.now(0) == StartReport("loading", 0.0, 0.0), "what was cut off is left, and no download any more"
    assert phases.now(GB) == StartReport("loading", 0.0, 0.5), "the share is of the size that the hub told"


def test_a_hub_that_does_not_tell_leaves_the_bytes_alone(
    make: Callable[..., StartPhases], clock: Clock, tmp_path: Path
) -> None:
    blobs = tmp_path / "models--org--a-model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "two.incomplete").write_bytes(b"2" * 12)
    asked = threading.Event()
    phases = make(cache=blobs.parent, ask_hub=asked.set)
    phases.begin()
    write_phase("loading", clock.now)
    assert phases.now(0) == StartReport("downloading", 0.0, None, 12)
    assert asked.wait(SOON_S)
    assert phases.now(0) == StartReport("downloading", 0.0, None, 12)


def test_the_hooks_are_on_vllms_methods_and_are_put_there_once(
    make: Callable[..., StartPhases], monkeypatch: pytest.MonkeyPatch
) -> None:
    requires("vllm")
    from serve_app.engine.vllm_adapter import phase_hooks

    def written() -> list[str]:
        return [line.split()[0] for line in Path(os.environ[PHASE_FILE]).read_text().splitlines()]

    class Worker:
        def init_device(self, value: int) -> int:
            assert written() == ["memory"]
            return value

    phases = make()
    phases.begin()
    for _ in range(2):
        phase_hooks.hook(Worker, "init_device", before="memory", after="loading")
    worker: Any = Worker()
    assert worker.init_device(7) == 7
    assert written() == ["memory", "loading"]
    hooked: list[str] = []
    monkeypatch.setattr(phase_hooks, "hook", lambda owner, method, **_: hooked.append(getattr(owner, method).__name__))
    phase_hooks.install()
    assert hooked == ["init_device", "determine_available_memory", "compile_or_warm_up_model", "aot_compile"]
