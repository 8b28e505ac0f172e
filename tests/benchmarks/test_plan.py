"""The order of windows, their prompts, and command lines that make no sense."""

from __future__ import annotations

import signal
from itertools import islice, pairwise

import pytest
from rich.console import Console

from benchmarks.common.arms import BenchmarkError, ModelChoice
from benchmarks.common.plan import MAX_TOKENS, Plan, labels_of, model_of, order, parse_arguments, plan_of, seed_of
from benchmarks.common.stage import run_folder
from benchmarks.common.workload import prompts
from serve_app.engine import tiny_model

KEYS = ["--clients", "1,8"]
LONGEST_PROMPT_TOKENS = 280  # 180 words and a number, with the chat template, and room to spare


def plan(*arguments: str) -> Plan:
    return plan_of(parse_arguments([*KEYS, *arguments], "text"))


def test_arms_that_stay_up_alternate_at_each_client_count() -> None:
    assert list(order(plan(), None)) == [("vllm", 1), ("ours", 1), ("vllm", 8), ("ours", 8)]


def test_one_arm_at_a_time_begins_with_the_one_that_is_up() -> None:
    assert list(order(plan(), {"ours"})) == [("ours", 1), ("ours", 8), ("vllm", 1), ("vllm", 8)]
    assert [arm for arm, _ in order(plan(), set())] == ["vllm", "vllm", "ours", "ours"]


def test_the_same_kind_twice_gets_two_names() -> None:
    assert labels_of(["vllm", "vllm"]) == ("vllm", "vllm#2")
    assert labels_of(["vllm", "ours"]) == ("vllm", "ours")


def test_quick_is_smaller_and_bounded_in_time() -> None:
    quick = plan("--quick")
    full = plan()
    assert quick.budget_s is not None
    assert quick.budget_s < 480
    assert full.budget_s is None
    assert quick.rounds * quick.window_s < full.rounds * full.window_s


def test_every_window_of_a_round_has_prompts_of_its_own() -> None:
    seeds = [seed_of(plan(), r, c) for r in range(1, 6) for c in (1, 8, 32, 64)]
    assert len(set(seeds)) == len(seeds)
    assert next(prompts(seeds[0])) != next(prompts(seeds[1]))


def test_prompts_repeat_with_their_seed_and_share_no_beginning() -> None:
    first, second = (list(islice(prompts(3), 200)) for _ in range(2))
    assert first == second
    assert all(a[:8] != b[:8] for a, b in pairwise(sorted(first)))


@pytest.mark.parametrize("arms", ["vllm,ours,vllm", "sglang", ""])
def test_unknown_or_too_many_arms_are_refused(arms: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--arms", arms], "text")
    assert "--arms takes" in capsys.readouterr().err


def test_a_batch_curve_needs_the_single_client(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--batch-curve", "--clients", "8"], "text")
    assert "needs 1" in capsys.readouterr().err


def test_a_batch_curve_has_128_clients_and_a_slot_and_kv_cache_for_each() -> None:
    options = parse_arguments(["--batch-curve", "--arms", "ours"], "text")
    model = model_of(options, "folder")
    assert plan_of(options).clients == (1, 2, 4, 8, 16, 32, 64, 128)
    assert model.max_num_seqs == 128
    kv_bytes = 2 * tiny_model.LAYERS * tiny_model.KV_HEADS * tiny_model.HEAD_SIZE * 4  # keys and values, float32
    assert model.kv_cache_bytes >= 128 * (LONGEST_PROMPT_TOKENS + MAX_TOKENS) * kv_bytes
    more = model_of(parse_arguments(["--batch-curve", "--clients", "1,256"], "text"), "folder")
    assert more.max_num_seqs == 256
    assert more.kv_cache_bytes == 2 * model.kv_cache_bytes


def test_other_modes_serve_what_they_served() -> None:
    assert model_of(parse_arguments(["--clients", "1,128"], "text"), "folder") == ModelChoice("folder")


def test_a_quick_curve_of_one_arm_is_bounded_by_six_minutes_and_of_two_by_eight() -> None:
    first, two = (
        plan_of(parse_arguments(["--batch-curve", "--quick", "--arms", a], "text")) for a in ("ours", "vllm,ours")
    )
    assert first.budget_s is not None
    assert two.budget_s is not None
    assert first.budget_s < 360 < two.budget_s < 480


def test_a_plot_is_of_a_batch_curve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--plot", "curve.svg"], "text")
    assert "--batch-curve" in capsys.readouterr().err


def test_logs_of_a_run_are_kept_when_it_fails_and_only_then(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with run_folder(Console()) as folder:
            assert folder.is_dir()
        assert not folder.exists()
        with pytest.raises(SystemExit) as ended, run_folder(Console()) as kept:
            raise BenchmarkError("the server is gone")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 1
    assert "the server is gone" in capsys.readouterr().out
    kept.rmdir()
