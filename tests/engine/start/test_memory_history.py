"""What engines were measured to need is what their next start asks for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine.start.memory_history import RECURS, SETTLED_S, STOOD_S, MemoryHistory, need_key
from serve_app.engine.start.memory_size import GIB, MEASURED_MARGIN, MemoryNeed
from serve_app.settings import ModelSettings

ESTIMATE = MemoryNeed(4 * GIB)
CONFIG = {"vocab_size": 262_144, "hidden_size": 640, "eos_token_id": 1}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., MemoryNeed]:
    """Runs an engine that is measured at these bytes, a second apart, and at the last for this long; what its next
    start asks for."""

    def measured(*sizes: int, for_s: float = STOOD_S, folder: Path = tmp_path) -> MemoryNeed:
        clock = Clock()
        history = MemoryHistory(folder, "k", clock)
        for size in sizes:
            history.measured(size)
            clock.now += 1.0
        for _ in range(int(for_s) if sizes else 0):
            history.measured(sizes[-1])
            clock.now += 1.0
        return MemoryHistory(folder, "k", clock).need(ESTIMATE)

    return measured


def with_margin(size: int) -> MemoryNeed:
    return MemoryNeed(round(size * MEASURED_MARGIN), True)


def test_before_anything_was_measured_the_estimate_counts(run: Callable[..., MemoryNeed]) -> None:
    assert run() == ESTIMATE


def test_a_need_above_the_estimate_counts_at_the_next_start(run: Callable[..., MemoryNeed]) -> None:
    assert run(6 * GIB, 6 * GIB) == with_margin(6 * GIB)


def test_a_need_below_the_estimate_counts_once_the_engine_has_run_for_a_while(run: Callable[..., MemoryNeed]) -> None:
    assert run(2 * GIB, 2 * GIB) == ESTIMATE
    assert run(2 * GIB, 2 * GIB, for_s=SETTLED_S) == with_margin(2 * GIB)


def test_what_stands_for_half_a_minute_between_lower_measurements_counts(run: Callable[..., MemoryNeed]) -> None:
    assert run(2 * GIB, *[6 * GIB] * int(2 * STOOD_S), 2 * GIB) == with_margin(6 * GIB)


@pytest.mark.parametrize(("spans", "counts"), [(RECURS - 1, False), (RECURS, True)])
def test_what_a_long_step_takes_for_a_second_counts_if_it_recurs(
    run: Callable[..., MemoryNeed], spans: int, counts: bool
) -> None:
    """On a CPU its memory is given back at once, and a grant without it would be overdrawn by each long step."""
    step = [3 * GIB, *[2 * GIB] * (int(STOOD_S) - 1)]
    assert run(*step * spans, 2 * GIB, for_s=SETTLED_S) == with_margin(3 * GIB if counts else 2 * GIB)


def test_of_steps_of_many_sizes_the_one_counts_that_is_reached_as_often(run: Callable[..., MemoryNeed]) -> None:
    sizes = [GIB * 2 + span * GIB // 4 for span in range(RECURS + 2)]
    steps = [size for most in sizes for size in (most, *[2 * GIB] * (int(STOOD_S) - 1))]
    assert run(*steps, 2 * GIB, for_s=SETTLED_S) == with_margin(sizes[2])


def test_the_largest_of_all_runs_counts(run: Callable[..., MemoryNeed]) -> None:
    run(6 * GIB, 6 * GIB)
    assert run(5 * GIB, 5 * GIB, for_s=SETTLED_S) == with_margin(6 * GIB)


def test_memory_that_is_counted_twice_while_a_process_forks_is_not_kept(run: Callable[..., MemoryNeed]) -> None:
    assert run(2 * GIB, 9 * GIB, 2 * GIB) == ESTIMATE


def test_a_compiler_that_runs_at_the_first_start_is_not_kept(run: Callable[..., MemoryNeed]) -> None:
    compiling = [int((2 + index % 5) * GIB) for index in range(120)]
    assert run(*compiling, 2 * GIB, for_s=SETTLED_S) == with_margin(2 * GIB)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"fixed_bytes": None, "settled": True})])
def test_a_broken_file_is_as_none(run: Callable[..., MemoryNeed], tmp_path: Path, text: str) -> None:
    (tmp_path / "k.json").write_text(text)
    assert run() == ESTIMATE
    assert run(6 * GIB, 6 * GIB) == with_margin(6 * GIB)


def test_a_folder_that_cannot_be_written_costs_only_the_memory_of_it(
    run: Callable[..., MemoryNeed], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert run(6 * GIB, 6 * GIB, folder=tmp_path / "file") == ESTIMATE


def key(
    config: dict[str, Any] = CONFIG, device: str = "cpu", version: str = "0.32.0", weights: int = 0, **settings: Any
) -> str:
    return need_key(ModelSettings(**{"name": "m", "path": "/a", **settings}), "cpu", weights, config, device, version)


@pytest.mark.parametrize(
    "other",
    [
        {"path": "/b"}, {"name": "n"}, {"kv_cache_gb": 3}, {"weights": 7}, {"config": CONFIG | {"eos_token_id": 2}},
        {"max_num_seqs": 64}, {"grammar_cpu_s": 2},
    ],
)  # fmt: skip
def test_what_changes_no_need_has_the_same_measurement(other: dict[str, Any]) -> None:
    assert key(**other) == key()


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float32"}, {"max_num_seqs": 8}, {"max_num_batched_tokens": 9000}, {"enforce_eager": True},
        {"device": "NVIDIA H100"}, {"version": "0.33.0"}, {"config": CONFIG | {"hidden_size": 1024}},
        {"tensor_parallel_size": 2}, {"task": "embed"}, {"extra_engine_args": {"kv_cache_dtype": "fp8"}},
        {"config": {}}, {"config": {}, "weights": 7},
    ],
)  # fmt: skip
def test_what_changes_the_need_has_a_measurement_of_its_own(other: dict[str, Any]) -> None:
    assert key(**other) != key()
