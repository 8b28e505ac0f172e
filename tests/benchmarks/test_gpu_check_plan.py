"""The plan of `benchmarks.gpu_check`: its arguments, what can be checked where, and where streams are cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_check import checks, main, plan


def options(*arguments: str) -> plan.Options:
    return plan.parse_arguments(arguments, "what it does")


@pytest.mark.parametrize(
    ("device", "gpus", "cores", "heads", "obstacles"),
    [
        ("gpu", 1, 16, 8, ["", "2 GPUs are needed, 1 there"]),
        ("gpu", 2, 16, 8, ["", ""]),
        ("gpu", 8, 1, None, ["", ""]),
        ("gpu", 2, 16, 9, ["", "9 attention heads cannot be shared out to 2 ranks"]),
        ("cpu", 0, 2, 8, ["", ""]),
        ("cpu", 0, 1, 8, ["", "2 cores are needed, 1 there"]),
    ],
    ids=["one GPU", "two GPUs", "eight GPUs", "odd heads", "two cores", "one core"],
)
def test_two_ranks_are_in_the_plan_with_the_reason_why_they_cannot_run(
    device: plan.Device, gpus: int, cores: int, heads: int | None, obstacles: list[str]
) -> None:
    found = plan.parts(device, gpus, cores, heads)
    assert [one.name for one in found] == ["TP=1", "TP=2"]
    assert [one.obstacle for one in found] == obstacles


@pytest.mark.parametrize(
    ("device", "build", "gpus", "error", "reported"),
    [
        ("gpu", "gpu", 1, "", ""),
        ("cpu", "cpu", 0, "NVML Shared Library Not Found", ""),
        ("gpu", "cpu", 0, "NVML Shared Library Not Found", "NVML Shared Library Not Found"),
        ("gpu", "gpu", 0, "", "NVML finds none"),
        ("gpu", "cpu", 1, "", "make setup DEVICE=gpu"),
        ("cpu", "gpu", 1, "", "make setup DEVICE=cpu"),
    ],
    ids=["gpu", "cpu", "no driver", "no GPU", "CPU build", "GPU build"],
)
def test_what_is_missing_for_any_check_is_named(
    device: plan.Device, build: str, gpus: int, error: str, reported: str
) -> None:
    missing = plan.obstacle(device, build, gpus, error)
    assert reported in missing
    assert bool(missing) == bool(reported)


def test_without_a_gpu_the_exit_status_is_two_and_the_last_line_says_why(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main.machine, "gpus", lambda: ([], "driver not loaded"))
    assert main.main([]) == checks.NO_GPU == 2
    last = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert last["verdict"] == "no device"
    assert "driver not loaded" in last["missing"]


def test_a_cpu_runs_the_built_in_model_in_float32_and_anything_else_as_it_comes() -> None:
    assert (options("--device", "cpu").dtype, options("--device", "cpu").tie_nats) == ("float32", 1e-3)
    assert options().dtype == options("--device", "cpu", "--model", "org/name").dtype == "auto"
    assert options().tie_nats > 1e-3
    assert (options().kv_cache_gb, options("--kv-cache-gb", "2").kv_cache_gb) == (4.0, 2.0)


def test_a_report_for_which_there_is_no_folder_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options("--out", str(tmp_path / "absent" / "report.md"))
    assert "there is no folder" in capsys.readouterr().err


def test_quick_is_smaller_and_measures_each_server_twice_all_the_same() -> None:
    quick = options("--quick")
    whole = options()
    assert quick.prompts < whole.prompts
    assert quick.windows.rounds == 2 < whole.windows.rounds
    assert quick.windows.arms == whole.windows.arms == ("vllm", "ours")
    assert options("--clients", "2,4").windows.clients == (2, 4)


@pytest.mark.parametrize(
    ("prompt", "tokens", "block", "found"),
    [
        (20, 30, 16, (11, 12, 13, 27, 28, 29)),
        (15, 4, 16, (1, 2)),
        (16, 3, 16, (1,)),
        (5, 4, 128, ()),
        (9, 4, 1, (1, 2, 3)),
    ],
    ids=["two borders", "a prompt before a border", "a prompt at a border", "no border", "blocks of one"],
)
def test_streams_are_cut_one_token_before_at_and_after_each_border(
    prompt: int, tokens: int, block: int, found: tuple[int, ...]
) -> None:
    assert plan.cuts(prompt, tokens, block) == found


@pytest.mark.parametrize("block", [1, 16, 128])
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 200])
def test_an_answer_passes_two_borders_whatever_its_prompt(prompt: int, block: int) -> None:
    tokens = plan.answer_tokens(prompt, block, 2048)
    at_border = [cut for cut in plan.cuts(prompt, tokens, block) if (prompt + cut) % block == 0]
    assert len(at_border) >= 2


def test_an_answer_is_no_longer_than_the_model_allows() -> None:
    assert plan.answer_tokens(2000, 1024, 2048) == 48
