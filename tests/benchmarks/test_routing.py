"""The model that routing rules are compared on, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import routing
from benchmarks.common.traces import TraceMissingError
from benchmarks.routing import Engines, arms, load_trace, play, request


def alone(key: str, loads: dict[str, int]) -> str | None:
    """The first replica while it has a slot."""
    return "replica-0" if loads["replica-0"] < routing.SLOTS else None


def conversation(turns: int, gap_s: float = 100.0) -> Sequence[routing.Request]:
    return [request(turn * gap_s, tuple(range(turn + 2)), 512 * (turn + 2), 10) for turn in range(turns)]


def test_what_was_prefilled_once_is_found_again() -> None:
    found = play(conversation(3), 1.0, alone)
    assert found.found == round((0 + 2 + 3) / (2 + 3 + 4), 3)
    assert found.spread == routing.REPLICAS


def test_a_prefix_is_found_only_as_far_as_it_is_whole() -> None:
    engines = Engines(alone)
    engines.arrive(request(0.0, (1, 2, 3), 1536, 1))
    engines.arrive(request(0.0, (1, 9, 3), 1536, 1))
    assert engines.found == 1


def test_who_finds_no_slot_waits_in_order() -> None:
    engines = Engines(alone)
    for number in range(routing.SLOTS + 2):
        engines.arrive(request(0.0, (number,), 0, 100))
    assert len(engines.ttfts) == routing.SLOTS
    engines.until(float("inf"))
    assert len(engines.ttfts) == routing.SLOTS + 2
    assert engines.ttfts[-1] >= 100 * routing.ITL_S
    assert sum(engines.loads.values()) == 0


def test_keys_find_more_than_chance_does() -> None:
    many = [request(float(number), (number % 20, number % 20 + 1000, number), 1536, 100) for number in range(400)]
    results = {name: play(many, 1.0, choose) for name, choose in arms().items()}
    assert results["ours"].found > results["two_choices"].found
    assert results["ours"].found >= results["bounded"].found


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceMissingError, match=routing.MOONCAKE_FILE):
        load_trace(tmp_path, None)
