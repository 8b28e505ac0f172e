"""The protocol's arithmetic on a trace small enough to do by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.openb import main
from benchmarks.openb.bound import unallocated_bound
from benchmarks.openb.fgd import FirstFit
from benchmarks.openb.main import (
    Plan,
    TraceMissingError,
    Visit,
    arrivals,
    load,
    overlap,
    run,
    steady,
    visits,
)
from benchmarks.openb.pods import Node, Pod

NODES = "sn,cpu_milli,memory_mib,gpu,model\na,8000,100,2,T4\nb,8000,100,2,T4\nc,8000,100,0,\n"
PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"
    "whole,1000,1,1,1000,\nhalf,1000,1,1,500,\npair,1000,1,2,1000,T4|G2\ncpu,1000,1,0,0,\n"
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / main.NODES_FILE).write_text(NODES)
    (tmp_path / main.PODS_FILE).write_text(PODS)
    return tmp_path


WHOLE = Pod(1, 1000, whole=True)


def node(name: str, gpus: int) -> Node:
    return Node(name, (1000,) * gpus, (1000,) * gpus)


def test_what_has_gpus_of_the_trace_becomes_nodes_and_pods(trace: Path) -> None:
    nodes, pods = load(trace)
    assert nodes == [node("a", 2), node("b", 2)]
    assert pods == [WHOLE, Pod(1, 500), Pod(2, 1000, whole=True)]


def test_a_gpu_that_is_cut_in_700s_leaves_300_at_full_demand() -> None:
    pod = Pod(1, 700)
    unallocated, came = arrivals([node("a", 7)], [pod], FirstFit(), seed=1)
    assert len(came) == 10
    assert unallocated == pytest.approx(0.3)
    assert unallocated_bound([node("a", 7)], {pod: 10}) == pytest.approx(0.3, abs=1e-3)


def test_the_bound_counts_what_fits_together_on_a_gpu() -> None:
    counts = {Pod(1, 700): 4.0, Pod(1, 300): 2.0}
    # two GPUs full, two with 700: 3.4 of 4
    assert unallocated_bound([node("a", 4)], counts) == pytest.approx(0.15, abs=1e-3)


def test_the_bound_never_has_more_than_was_asked_for() -> None:
    assert unallocated_bound([node("a", 4)], {WHOLE: 1.0}) == pytest.approx(0.75, abs=1e-3)
    assert unallocated_bound([node("a", 4)], {}) == 1.0


def test_the_bound_is_below_what_a_policy_leaves(trace: Path) -> None:
    nodes, pods = load(trace)
    for seed in range(20):
        unallocated, came = arrivals(nodes, pods, FirstFit(), seed)
        counts = {pod: float(came.count(pod)) for pod in came}
        assert unallocated_bound(nodes, counts) <= unallocated + 1e-9


def test_steady_share_is_an_average_over_time_inside_the_window() -> None:
    pod = WHOLE
    coming = [Visit(pod, 0.0, 2.0), Visit(pod, 1.5, 9.0), Visit(pod, 1.6, 3.0), Visit(pod, 2.0, 9.0)]
    # two GPUs from 1 to 3: the first pod until 2, the second from 1.5 on, the third has no room, the fourth from 2 on
    unallocated = steady([node("a", 2)], coming, FirstFit(), 1.0, 3.0)
    assert 1 - unallocated == pytest.approx((1.0 + 1.5 + 1.0) / 4)
    assert overlap(coming[0], 1.0, 3.0) == 1.0


def test_the_steady_state_starts_full_and_keeps_its_demand() -> None:
    nodes = [node("a", 500)]
    pods = [WHOLE]
    coming = visits(nodes, pods, seed=3, until=4.0)
    assert sum(visit.comes == 0.0 for visit in coming) == 550
    late = sum(overlap(visit, 2.0, 4.0) for visit in coming) / 2
    assert late == pytest.approx(550, rel=0.1)  # Poisson: 4% is one standard deviation


def test_a_run_has_every_policy_and_the_bound(trace: Path) -> None:
    plan = Plan(seeds=2, warmup=0.5, window=0.5)
    result = run(plan, trace)
    assert list(result["openb"]) == ["ours", "best_fit", "first_fit", "fgd", "bound"]
    for figures in result["openb"].values():
        assert list(figures) == ["unallocated_at_100", "unallocated_steady"]
        assert all(0 <= share <= 1 for share in figures.values())
    assert len(main.verdicts(result["openb"])) == 4


def test_a_missing_trace_is_reported_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TraceMissingError, match="openb_gpu_pods"):
        load(tmp_path)
    assert main.main(["--data", str(tmp_path)]) == 0
    assert "skipped" in capsys.readouterr().out
