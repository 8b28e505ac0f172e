"""The parts of `benchmarks.gpu_check` without a machine: its comparisons, its verdicts, its report."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from benchmarks.gpu_check import checks, engine_log, plan, report
from benchmarks.gpu_check.answers import Answer, compare, first_difference
from benchmarks.gpu_check.checks import KvSize, LedgerDevice, Outcome, Result
from benchmarks.gpu_check.engine_log import EngineFacts

GB = 10**9
TIE = 0.25


def answer(*tokens: int, margins: tuple[float, ...] = (), text: str = "", error: str = "") -> Answer:
    return Answer((7, 8), tokens, text, margins, error)


@pytest.mark.parametrize(
    ("wanted", "got", "place"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1,), 1), ((), (5,), 0), ((), (), None)],
)
def test_the_first_difference_is_a_token_or_an_end(
    wanted: tuple[int, ...], got: tuple[int, ...], place: int | None
) -> None:
    assert first_difference(wanted, got) == place


def test_a_difference_counts_as_a_tie_only_where_the_two_likeliest_are_close() -> None:
    same = ("same", answer(1, 2, text="ab"), answer(1, 2, text="ab"))
    tie = ("tie", answer(1, 2, margins=(3.0, 0.2)), answer(1, 9))
    far = ("far", answer(1, 2, margins=(0.1, 3.0)), answer(1, 9))
    found = compare([same, tie], TIE)
    assert (found.equal, found.holds, found.ties) == (
        1,
        True,
        ("tie, token 1: 2 and 9, the two likeliest 0.2 nats apart",),
    )
    assert not compare([tie], TIE).holds  # nothing was compared to its end
    assert compare([same, tie, far], TIE).differences == ("far, token 1: 2 and 9, the two likeliest 3 nats apart",)


@pytest.mark.parametrize(
    "got",
    [answer(1, text="ab"), answer(1, 2, text="xy"), answer(1, 2, 3, text="abc")],
    ids=["shorter", "another text", "longer"],
)
def test_an_answer_of_another_length_or_text_is_no_tie(got: Answer) -> None:
    found = compare([("it", answer(1, 2, margins=(0.0, 0.0), text="ab"), got)], TIE)
    assert (found.equal, len(found.ties), len(found.differences)) == (0, 0, 1)


def test_the_rest_of_an_answer_begins_with_all_that_came_before_it() -> None:
    rest = answer(1, 2, 3, margins=(0.1, 0.2, 0.3), text="abc").rest(2)
    assert (rest.prompt, rest.tokens, rest.margins) == ((7, 8, 1, 2), (3,), (0.3,))


def nvml(granted: int, before: int, after: int, reserved: int = 2 * GB) -> Result:
    return checks.nvml("TP=1", [LedgerDevice(0, granted, reserved)], [before], [after])


@pytest.mark.parametrize(
    ("granted", "before", "after", "outcome"),
    [
        (10 * GB, 0, 9 * GB, Outcome.PASS),
        (10 * GB, GB, 11 * GB, Outcome.PASS),
        (10 * GB, 0, 104 * GB // 10, Outcome.PASS),
        (10 * GB, 0, 106 * GB // 10, Outcome.FAIL),
        (10 * GB, 3 * GB, 124 * GB // 10, Outcome.FAIL),
        (0, GB, GB, Outcome.PASS),
        (0, 0, GB, Outcome.FAIL),
    ],
    ids=["within", "beside others", "within 5%", "above 5%", "others above the reserve", "unused", "granted nothing"],
)
def test_what_nvml_sees_must_be_granted_and_the_rest_within_the_reserve(
    granted: int, before: int, after: int, outcome: Outcome
) -> None:
    assert nvml(granted, before, after).outcome is outcome


def test_a_gpu_that_the_ledger_does_not_know_is_a_failure() -> None:
    found = checks.nvml("TP=1", [LedgerDevice(0, GB, GB)], [0, 0], [GB, 0])
    assert (found.outcome, found.seen) == (Outcome.FAIL, "the ledger has 1 devices, NVML 2 GPUs")


@pytest.mark.parametrize(
    ("measured", "outcome"),
    [(GB, Outcome.PASS), (104 * GB // 100, Outcome.PASS), (2 * GB, Outcome.FAIL), (None, Outcome.NOT_APPLICABLE)],
    ids=["within", "within 5%", "above", "not measured"],
)
def test_engines_must_measure_what_they_were_granted(measured: int | None, outcome: Outcome) -> None:
    engine = {"replica": "a", "granted_bytes": GB, "measured_bytes": measured, "kv_tokens": 1}
    assert checks.ledger("TP=1", [engine]).outcome is outcome


def test_a_ledger_without_an_engine_is_a_failure() -> None:
    assert checks.ledger("TP=1", []).outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("ledger", "ours", "vllm", "outcome"),
    [
        (1600, 1600, 1600, Outcome.PASS),
        (1600, 1600, 1616, Outcome.PASS),
        (1600, 1600, 1632, Outcome.FAIL),
        (1200, 1200, 1200, Outcome.FAIL),
        (1600, None, 1600, Outcome.FAIL),
    ],
    ids=["equal", "a block apart", "two blocks apart", "not the settlement's", "no log"],
)
def test_kv_tokens_agree_within_a_block(ledger: int, ours: int | None, vllm: int | None, outcome: Outcome) -> None:
    size = KvSize(granted_bytes=9000, kv_bytes=3210, bytes_per_token=2.0, block_tokens=16)
    assert size.tokens == 1600
    assert checks.kv("TP=1", size, ledger, ours, vllm).outcome is outcome


def test_a_model_whose_token_size_is_not_known_is_compared_without_the_settlement() -> None:
    size = KvSize(9000, 3210, None, 16)
    assert checks.kv("TP=1", size, 1200, 1200, 1200).outcome is Outcome.PASS


@pytest.mark.parametrize(
    ("facts", "beside", "outcome"),
    [
        (EngineFacts(eager=False, graph_bytes=GB, graph_mode="FULL"), [2 * GB], Outcome.PASS),
        (EngineFacts(eager=False, graph_bytes=GB, graph_mode="FULL"), [2 * GB, 4 * GB], Outcome.FAIL),
        (EngineFacts(eager=False, graph_bytes=4 * GB, graph_mode="FULL"), [2 * GB], Outcome.FAIL),
        (EngineFacts(eager=True), [2 * GB], Outcome.PASS),
        (EngineFacts(eager=False), [2 * GB], Outcome.FAIL),
        (EngineFacts(eager=False), None, Outcome.NOT_APPLICABLE),
    ],
    ids=["within", "a rank above", "graphs above", "eager", "none captured", "a CPU"],
)
def test_graphs_are_captured_within_the_overhead_that_the_ledger_counts(
    facts: EngineFacts, beside: list[int] | None, outcome: Outcome
) -> None:
    assert checks.graphs("TP=1", facts, 3 * 2**30, beside).outcome is outcome


LOG = """
1 INFO Initializing a V1 LLM engine (v0.32.0) with config: model='m', enforce_eager=True, compilation_config={}
1 INFO GPU KV cache size: 1 tokens, Maximum concurrency for 2,048 tokens per request: 0.01x
2 INFO Initializing a V1 LLM engine (v0.32.0) with config: model='m', enforce_eager=False, quantization=None, \
compilation_config={'mode': <CompilationMode.VLLM_COMPILE: 3>, \
'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>}
3 INFO Model loading took 1.25 GiB memory and 0.593331 seconds
2 INFO GPU KV cache size: 81,920 tokens, Maximum concurrency for 2,048 tokens per request: 40.00x
3 INFO Graph capturing finished in 4 secs, took 0.50 GiB
4 INFO Graph capturing finished in 4 secs, took 0.75 GiB
"""


def test_the_last_start_in_vllms_log_is_read() -> None:
    assert engine_log.read(LOG) == EngineFacts(
        kv_tokens=81_920,
        graph_bytes=3 * 2**28,
        weights_bytes=5 * 2**28,
        eager=False,
        graph_mode="FULL_AND_PIECEWISE",
    )


def test_a_log_that_says_nothing_is_no_fact() -> None:
    assert engine_log.read("nothing") == EngineFacts()


def test_a_killed_stream_must_continue_or_end_with_an_error_and_come_to_the_same_answer() -> None:
    same = compare([("it", answer(1, 2), answer(1, 2))], TIE)
    other = compare([("it", answer(1, 2), answer(1, 3))], TIE)
    tie = compare([("it", answer(1, 2, margins=(3.0, 0.1)), answer(1, 3))], TIE)
    cut = answer(1, error="engine_failed")
    assert checks.killed("TP=1", cut, 2, tie, same, {}).outcome is Outcome.PASS
    assert checks.killed("TP=1", cut, 2, same, same, {}).outcome is Outcome.PASS
    assert checks.killed("TP=1", cut, 2, other, same, {}).outcome is Outcome.FAIL
    assert checks.killed("TP=1", cut, 2, same, other, {}).outcome is Outcome.FAIL
    assert checks.killed("TP=1", answer(1), 2, same, same, {}).outcome is Outcome.FAIL
    assert checks.killed("TP=1", answer(1), 0, same, same, {}).outcome is Outcome.PASS  # the next engine went on


def test_without_a_border_within_an_answer_continuation_does_not_apply() -> None:
    found = compare([("streamed", answer(1), answer(1))], TIE)
    assert checks.borders("TP=1", found, 0, 4096).outcome is Outcome.NOT_APPLICABLE
    assert checks.borders("TP=1", found, 3, 16).outcome is Outcome.PASS


def speeds(foreign: float = 0.0, **ratios: float | None) -> dict[str, Any]:
    counts = {name.removeprefix("c"): ratio for name, ratio in ratios.items()}
    by_count = {count: {"tokens_per_s": {"value": 100.0}} for count in counts}
    return {
        "arms": {"vllm": by_count, "ours": by_count},
        "ratio": counts,
        "ttft_added_ms": dict.fromkeys(counts, 1.5),
        "bars": {"ratio": {"1": 0.95}},
        "cpu_us_per_token_outside_engine": {"vllm": 80.0, "ours": 140.0},
        "conditions": {"foreign_cores_max": foreign},
    }


@pytest.mark.parametrize(
    ("measured", "outcome"),
    [
        (speeds(c1=0.99, c8=0.8), Outcome.PASS),
        (speeds(c1=0.99, c8=0.5), Outcome.FAIL),
        (speeds(c1=None), Outcome.FAIL),
        (speeds(), Outcome.FAIL),
    ],
    ids=["fast", "slow", "no figure", "nothing measured"],
)
def test_throughput_fails_where_far_below_vllms_own_server(measured: dict[str, Any], outcome: Outcome) -> None:
    assert checks.throughput("TP=1", measured).outcome is outcome


@pytest.mark.parametrize(
    ("device", "cores", "ranks", "verdict"),
    [("gpu", 2, 2, True), ("cpu", 2, 1, True), ("cpu", 2, 2, False), ("cpu", 4, 2, True)],
    ids=["a GPU", "one rank", "two ranks on two cores", "two ranks on four cores"],
)
def test_where_ranks_take_all_cores_the_throughput_has_figures_and_no_verdict(
    device: plan.Device, cores: int, ranks: int, verdict: bool
) -> None:
    found = checks.throughput("TP=2", speeds(c1=0.5), plan.crowded(device, cores, ranks))
    assert found.outcome is (Outcome.FAIL if verdict else Outcome.NOT_APPLICABLE)
    assert "0.5 at 1 clients" in found.seen
    assert found.figures["by clients"]


def test_ratios_beside_other_load_are_called_noise() -> None:
    assert checks.throughput("TP=1", speeds(c1=0.9)).seen == "0.9 at 1 clients of vLLM's own tokens/s"
    assert checks.throughput("TP=1", speeds(0.9, c1=0.9)).seen.endswith("others used 0.9 cores, so it is noise")


def test_the_environment_fails_with_a_failed_check_of_doctor_and_not_with_a_warning() -> None:
    assert checks.environment([("disk", "warn", "little")], {}).outcome is Outcome.PASS
    found = checks.environment([("disk", "warn", "little"), ("GPU", "fail", "none answers")], {})
    assert (found.outcome, found.seen) == (Outcome.FAIL, "GPU: none answers")


PASSES = Result("a", "TP=1", Outcome.PASS, "well")


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([PASSES, checks.not_applicable("b", "TP=2", "one GPU")], 0),
        ([PASSES, checks.failure("b", "TP=1", "broken")], 1),
        ([checks.not_applicable("b", "TP=2", "one GPU")], 1),
        ([], 1),
    ],
    ids=["passed", "one failed", "nothing applied", "nothing done"],
)
def test_the_exit_status_is_zero_only_if_something_passed_and_nothing_failed(
    results: list[Result], status: int
) -> None:
    assert checks.exit_status(results) == status


def test_a_failure_shows_its_first_line_and_keeps_the_rest() -> None:
    found = checks.failure("start", "TP=1", "\nvllm ended with 1\nlog\n")
    assert (found.seen, found.figures["error"]) == ("vllm ended with 1", "\nvllm ended with 1\nlog\n")
    assert checks.failure("start", "TP=1", "").outcome is Outcome.FAIL


def test_the_report_has_every_check_with_its_figures() -> None:
    figures = {"tokens": 81920, "none": None, "GPUs": [{"GPU": 0, "name": "a|b"}], "error": "one\ntwo"}
    results = [
        Result("KV cache", "TP=1", Outcome.PASS, "equal", figures),
        checks.not_applicable("NVML", "TP=2", "one GPU"),
    ]
    text = report.markdown(results, "python -m benchmarks.gpu_check", {"commit": "abc"})
    assert text.startswith("# GPU check\n\n**pass (1 pass, 0 fail, 1 not applicable)**\n")
    for line in (
        "| KV cache | TP=1 | pass | equal |",
        "| NVML | TP=2 | not applicable | one GPU |",
        "## KV cache TP=1: pass",
        "- tokens: 81,920",
        "- none: -",
        "| 0 | a\\|b |",
        "two",
        ' "commit": "abc"',
    ):
        assert line in text.splitlines()


def test_the_terminal_shows_one_row_a_check_and_json_the_same() -> None:
    results = [PASSES, checks.failure("b", "TP=2", "[broken]")]
    console = Console(width=100)
    with console.capture() as shown:
        console.print(report.table(results))
    assert "[broken]" in shown.get()
    assert report.verdict(results) == "FAIL (1 pass, 1 fail, 0 not applicable)"
    document = json.loads(json.dumps(report.as_json(results, {"commit": "abc"}, "out.md")))
    assert (document["verdict"], [one["result"] for one in document["checks"]]) == ("fail", ["pass", "fail"])
