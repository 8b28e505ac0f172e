"""Fairness and overload of any endpoint against a fair server, one by order of arrival, and plain sums."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.endpoint import compare
from benchmarks.endpoint.compare import ROWS, table
from benchmarks.endpoint.traffic import Seen
from benchmarks.fairness import endpoint as fairness
from benchmarks.fairness import main as fairness_main
from benchmarks.fairness.endpoint import BACKLOGGED, ONE_KEY, OWN_KEYS, SKEWED
from benchmarks.fairness.metric import largest_difference
from benchmarks.overload import endpoint as overload
from benchmarks.overload import main as overload_main
from benchmarks.overload.offered_load import GROUPS, HIGH
from benchmarks.overload.open_loop_client import Ended
from tests.benchmarks.fake_endpoint import FakeEndpoint, by_priority, by_service, serving
from tests.benchmarks.test_endpoint import KEYS, SIZE, TENANT_OF, target

CONSOLE = Console(quiet=True)
RATE = 60.0  # what two slots of the fake serve, at 30 ms a request
SECONDS = 0.8  # of a load: fifty answers
PRIORITIES = ("--priority", "high=0", "--priority", "normal=1", "--priority", "low=2")


def fairness_of(
    endpoint: FakeEndpoint, **changes: Any
) -> tuple[dict[str, Any], fairness.Played, fairness.EndpointPlan]:
    with serving(endpoint) as url:
        plan = fairness.EndpointPlan(target(url), SIZE, 1, SECONDS, **changes)
        result, played = fairness.measure(plan, CONSOLE)
    return result, played, plan


def plain_service(seen: Seen, tenant: int, begin_s: float, end_s: float) -> float:
    """Input tokens of a tenant in a span, request by request."""
    total = 0.0
    for flight in seen.flights:
        if flight.offer.tenant == tenant and flight.usage is not None:
            first = flight.first - seen.began
            last = flight.last - seen.began
            worth = flight.usage.prompt_tokens + 2 * flight.usage.completion_tokens
            total += worth * max(0.0, min(end_s, last) - max(begin_s, first)) / (last - first)
    return total


@pytest.fixture(scope="module")
def fair() -> tuple[dict[str, Any], fairness.Played, fairness.EndpointPlan]:
    return fairness_of(FakeEndpoint(TENANT_OF, order=by_service), rate=RATE)


@pytest.fixture(scope="module")
def in_order() -> tuple[dict[str, Any], fairness.Played, fairness.EndpointPlan]:
    return fairness_of(FakeEndpoint(TENANT_OF), rate=RATE)


def test_a_fair_server_serves_alike_and_one_by_order_of_arrival_by_demand(fair: Any, in_order: Any) -> None:
    assert 1.0 <= fair[0]["service_ratio"] < 1.35
    for ratio in (fair[0]["one_key_service_ratio"], in_order[0]["service_ratio"]):
        assert 1.4 < ratio < 4.0  # demand is 1:2; a load has fifty answers, on a machine that may be busy
    assert fair[0]["light_tenants"] == ["light"]
    assert fair[0]["light_ttft_p50_gain"] > 2 * in_order[0]["light_ttft_p50_gain"]
    assert fair[0]["max_service_diff"] < in_order[0]["max_service_diff"]
    assert fair[0]["failed"] == fair[0]["refusals"] == 0


def test_the_service_ratio_and_the_rates_are_plain_sums(fair: Any) -> None:
    result, played, plan = fair
    for arm, figure in ((OWN_KEYS, "service_ratio"), (ONE_KEY, "one_key_service_ratio")):
        seen = played.seen[BACKLOGGED][arm]
        services = [plain_service(seen, tenant, plan.span.begin_s, plan.span.end_s) for tenant in (0, 1)]
        assert result[figure] == pytest.approx(max(services) / min(services), rel=1e-3)
        reported = result["loads"][BACKLOGGED][arm]["service_per_s"]
        assert [reported[tenant] for tenant in KEYS] == pytest.approx(
            [service / plan.span.length_s for service in services], rel=1e-3
        )


def test_the_largest_difference_is_that_of_any_two_moments_while_both_wait(fair: Any) -> None:
    result, played, plan = fair
    seen = played.seen[BACKLOGGED][OWN_KEYS]
    moments = np.linspace(plan.span.begin_s, plan.span.end_s, fairness.MOMENTS)
    got = [[plain_service(seen, tenant, 0.0, at) for at in moments] for tenant in (0, 1)]

    def waits(tenant: int, at_s: float) -> bool:
        return any(
            flight.due - seen.began <= at_s < (flight.first or flight.ended) - seen.began
            for flight in seen.flights
            if flight.offer.tenant == tenant
        )

    worst = 0.0
    both = [waits(0, at) and waits(1, at) for at in moments]
    for begin in range(len(moments)):
        for end in range(begin, len(moments)):
            if all(both[begin : end + 1]):
                gained = [row[end] - row[begin] for row in got]
                worst = max(worst, abs(gained[0] - gained[1]))
    assert worst > 0
    assert result["max_service_diff"] == pytest.approx(worst, rel=1e-3)


@pytest.mark.parametrize(("q", "figure"), [(0.99, "light_ttft_p99_gain"), (0.5, "light_ttft_p50_gain")])
def test_the_gain_of_light_tenants_is_the_ratio_of_their_sorted_waits(fair: Any, q: float, figure: str) -> None:
    result, played, _ = fair
    waits = {}
    for arm, seen in played.seen[SKEWED].items():
        light = sorted(f.first - f.due if f.first else math.inf for f in seen.flights if f.offer.tenant == 0)
        waits[arm] = light[math.ceil(q * len(light)) - 1]
    assert result[figure] == pytest.approx(waits[ONE_KEY] / waits[OWN_KEYS], rel=1e-3)


def test_a_figure_that_was_not_measured_has_its_reason(fair: Any, in_order: Any) -> None:
    assert "60 s" in fair[0]["not_measured"]["max_diff_over_rate"]
    for result in (fair[0], in_order[0]):
        silent = {name for name, value in result.items() if value is None}
        assert silent <= result["not_measured"].keys()


def test_without_usage_no_service_is_known_and_first_tokens_are() -> None:
    result, played, _ = fairness_of(FakeEndpoint(TENANT_OF, order=by_service, usage="none"), rate=RATE)
    assert result["service_ratio"] is result["max_service_diff"] is result["throughput_over_one_key"] is None
    finished = len(played.seen[BACKLOGGED][OWN_KEYS].finished)
    assert result["not_measured"]["service_ratio"] == f"{finished} finished answers have no usage"
    assert result["loads"][SKEWED][OWN_KEYS]["first_token_ms"]["light"]["n"] > 0
    assert result["light_ttft_p50_gain"] is not None


def test_no_gain_is_known_where_light_tenants_are_refused() -> None:
    endpoint = FakeEndpoint(TENANT_OF, refuses=lambda asked: asked.tenant == "light" and asked.prompt_tokens > 9)
    result, _, _ = fairness_of(endpoint, rate=RATE)
    assert result["light_ttft_p99_gain"] is None
    assert "over 1%" in result["not_measured"]["light_ttft_p99_gain"]
    assert result["refusals"] > 0


def test_a_closed_loop_has_clients_by_demand() -> None:
    result, played, plan = fairness_of(FakeEndpoint(TENANT_OF, order=by_service, slots=1), closed=True)
    assert plan.clients() == {"light": 1, "heavy": 3}
    seen = played.seen[BACKLOGGED][OWN_KEYS]
    for tenant, clients in enumerate(plan.clients().values()):
        events = sorted(
            event for f in seen.flights if f.offer.tenant == tenant for event in ((f.sent, 1), (f.ended, -1))
        )
        assert max(np.cumsum([change for _, change in events])) <= clients
    assert result["light_tenants"] == ["light"]
    assert result["service_ratio"] is not None


@given(st.integers(1, 3), st.data())
def test_the_largest_difference_is_that_of_brute_force(clients: int, data: Any) -> None:
    length = data.draw(st.integers(1, 8))
    steps = st.lists(st.integers(0, 9), min_size=length, max_size=length)
    flags = st.lists(st.booleans(), min_size=length, max_size=length)
    served = np.cumsum([data.draw(steps) for _ in range(clients)], axis=1).astype(np.float64)
    waiting = np.array([data.draw(flags) for _ in range(clients)], dtype=np.bool_)
    worst = 0.0
    for a in range(clients):
        for b in range(a):
            for begin in range(length):
                for end in range(begin, length):
                    if waiting[[a, b], begin : end + 1].all():
                        got = served[:, end] - served[:, begin]
                        worst = max(worst, abs(got[a] - got[b]))
    assert largest_difference(served, waiting) == worst


# Overload.


def overload_of(endpoint: FakeEndpoint, **changes: Any) -> tuple[dict[str, Any], overload.EndpointPlan]:
    with serving(endpoint) as url:
        given: dict[str, Any] = {"multiples": (0.5, 4.0), "seconds": SECONDS, **changes}
        plan = overload.EndpointPlan(target(url, *PRIORITIES), SIZE, 1, **given)
        return overload.measure(plan, CONSOLE), plan


def test_an_endpoint_with_classes_answers_high_first_and_goodput_is_what_was_finished_in_time() -> None:
    endpoint = FakeEndpoint(TENANT_OF, order=by_priority)
    result, _ = overload_of(endpoint, rate=40.0, unloaded=(0.02, 20.0))
    peak = result["windows"][overload.ENDPOINT]["4"]
    assert result["high_4x"]["answered"] == result["high_4x"]["offered"] > 3
    assert peak["ttft_ms"]["low"]["p50"] is None or peak["ttft_ms"]["low"]["p50"] > 2 * peak["ttft_ms"]["high"]["p50"]
    assert {asked.body["priority"] for asked in endpoint.asked if "priority" in asked.body} == {0, 1, 2}
    assert set(TENANT_OF.values()) == {asked.tenant for asked in endpoint.asked}
    assert result["levels"]["ttft_level_ms"][HIGH] == pytest.approx(100.0)
    assert result["generator_late_p99_ms"] is not None


def test_the_figures_of_a_load_are_plain_sums() -> None:
    endpoint = FakeEndpoint(TENANT_OF, order=by_priority)
    with serving(endpoint) as url:
        plan = overload.EndpointPlan(target(url, *PRIORITIES), SIZE, 1, (4.0,), SECONDS)
        levels = overload.Levels(0.01, 20.0, 40.0)
        seen = overload.seen_at(plan, levels, 4.0)
    window = overload.window_of(plan, levels, 4.0, seen)
    figures, reason = overload.figures_of(window, seen)
    assert reason is None
    spans = plan.spans()
    begin = spans["warmup_s"]
    end = begin + spans["window_s"]
    good = 0
    asked = dict.fromkeys(GROUPS, 0)
    met = dict.fromkeys(GROUPS, 0)
    for flight in seen.flights:
        first = flight.first - flight.due
        gap_ms = overload.gap_ms_of(flight)
        within = flight.outcome is Ended.FINISHED and first <= levels.ttft_level_s(flight.offer.group)
        within = within and gap_ms is not None and gap_ms <= levels.itl_level_ms
        due = round(flight.due - seen.began, 4)  # as rows are kept
        if begin <= due < end:
            asked[flight.offer.group] += 1
            met[flight.offer.group] += within
        if within and flight.usage and begin <= due + round(flight.ended - flight.due, 6) < end:
            good += flight.usage.completion_tokens
    assert figures["offered"] == asked
    assert figures["goodput_tokens_per_s"] == pytest.approx(good / spans["window_s"], rel=1e-3)
    for group in GROUPS:
        assert figures["attainment"][group] == pytest.approx(met[group] / asked[group], rel=1e-3)
    waits = sorted(
        (f.first - f.due) * 1e3
        for f in seen.flights
        if f.offer.group == HIGH and f.first and begin <= f.due - seen.began < end
    )
    assert figures["ttft_ms"][HIGH]["p50"] == pytest.approx(waits[math.ceil(len(waits) / 2) - 1], rel=1e-3)


def test_without_usage_no_goodput_is_known_and_first_tokens_are() -> None:
    result, _ = overload_of(FakeEndpoint(TENANT_OF, usage="none"), rate=40.0, unloaded=(0.02, 20.0))
    assert result["goodput_4x_over_peak"] is result["low_token_share_4x"] is None
    assert "no usage" in result["not_measured"]["goodput_4x_over_peak"]
    assert result["windows"][overload.ENDPOINT]["4"]["ttft_ms"][HIGH]["n"] > 0


def test_levels_and_capacity_are_the_endpoints_own_and_refusals_are_timed() -> None:
    endpoint = FakeEndpoint(TENANT_OF, refuses=lambda asked: len(endpoint.waiting) > 8)
    result, _ = overload_of(endpoint, closed=False)
    assert result["levels"]["capacity_requests_per_s"] > 10
    assert result["levels"]["unloaded_itl_p50_ms"] >= 4  # its tokens are 5 ms apart
    assert result["refusals"] > 0
    assert result["refusal_p99_ms"] > 0


def test_a_closed_loop_of_classes_waits_for_its_answers() -> None:
    result, plan = overload_of(FakeEndpoint(TENANT_OF, order=by_priority), closed=True, rate=1.0)
    assert plan.staying(4.0) == {"high": 2, "normal": 6, "low": 8}
    peak = result["windows"][overload.ENDPOINT]["4"]
    assert peak["outcomes"]["high"].keys() == {"finished"}
    assert result["goodput_4x_over_peak"] is not None


# The commands.


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Undoes what a command does with the signal."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def last_line(text: str) -> dict[str, Any]:
    found = json.loads(text.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


def arguments(url: str, *more: str) -> list[str]:
    keys = [f"--key={tenant}={key}" for tenant, key in KEYS.items()]
    sizes = [
        "--seconds",
        "1",
        "--prompt-words",
        "3-6",
        "--answer-tokens",
        "4-8",
        "--rate",
        "60",
        "--drain-seconds",
        "10",
    ]
    return ["--url", url, "--model", "m", *keys, *sizes, *more]


@pytest.mark.long
@pytest.mark.usefixtures("sigterm")
def test_the_commands_draw_and_end_with_one_line_of_json_without_a_key(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeEndpoint(TENANT_OF, order=by_service)) as url:
        assert fairness_main.main(arguments(f"{url}/v1", "--plot", str(tmp_path / "fairness.svg"))) == 0
        fair, shown = capfd.readouterr()
        more = ("--quick", "--unloaded", "20,20", "--plot", str(tmp_path / "overload.svg"))
        assert overload_main.main(arguments(url, *more)) == 0
        loaded, _ = capfd.readouterr()
    assert last_line(fair)["service_ratio"] >= 1.0
    assert last_line(fair)["conditions"]["endpoint"]["tenants"] == list(KEYS)
    assert list(last_line(loaded)["windows"][overload.ENDPOINT]) == ["0.5", "1", "4"]
    assert "own keys" in (tmp_path / "fairness.svg").read_text()
    assert "offered load" in (tmp_path / "overload.svg").read_text()
    assert not any(key in text for key in KEYS.values() for text in (fair, shown, loaded))


@pytest.mark.usefixtures("sigterm")
def test_a_command_without_an_answer_ends_with_1(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        fairness_main.main(arguments("http://127.0.0.1:1"))
    assert "no connection" in capfd.readouterr().err.replace("\n", " ")
    assert overload_main.main(arguments("http://127.0.0.1:1")) == 1


def test_the_table_has_a_column_for_each_endpoint() -> None:
    wait = {"p50": 12.0, "n": 3, "offered": 4}
    nobody = {"p50": None, "n": 0, "offered": 4}
    loads = {load: {"ttft_ms": {HIGH: each}} for load, each in (("0.5", nobody), ("4", wait))}
    figures = {name: float(number) for number, (_, _, name) in enumerate(ROWS)}
    result = {"fairness": figures, "overload": figures | {"windows": {overload.ENDPOINT: loads}}}
    lines = table({"a": result, "b": result | {"fairness": figures | {"service_ratio": None}}})
    assert lines[0] == "|  | a | b |"
    assert lines[2].endswith("| 0 | not measured |")
    assert lines[-2].endswith("| (0 of 4) | (0 of 4) |")
    assert lines[-1].endswith("| 12 (3 of 4) | 12 (3 of 4) |")
    assert all(first.count("|") == second.count("|") for first, second in pairwise(lines))


@dataclass
class FakeArm:
    """A fake server in place of one of the compared."""

    url: str
    api_key: str
    stop: Callable[[], None]


@pytest.mark.long
def test_the_comparison_asks_each_endpoint_in_its_own_way_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    endpoints: dict[str, FakeEndpoint] = {}

    def start(label: str, *_: Any, keys: Sequence[Mapping[str, Any]] = (), **__: Any) -> FakeArm:
        tenants = {each["key"]: each["tenant"] for each in keys} or {"the-key": "everybody"}
        endpoints[label] = FakeEndpoint(tenants, order=by_service if keys else None)
        running = ExitStack()
        url = running.enter_context(serving(endpoints[label]))
        return FakeArm(url, "the-key", running.close)

    monkeypatch.setattr(compare, "start", start)
    monkeypatch.setattr(compare, "installed", lambda folder, console: folder / "litellm")
    monkeypatch.setattr(compare, "start_proxy", lambda command, engine, model, logs: start("litellm"))
    monkeypatch.setattr(compare, "ensure_tiny_model", lambda: tmp_path)
    sizes = ["--seconds", "0.4", "--prompt-words", "3-6", "--answer-tokens", "4-8", "--clients", "3", "--quick"]
    options = fairness_main.parser_of().parse_args(["--compare", str(tmp_path), *sizes])
    assert compare.compare(tmp_path, options, CONSOLE) == 0
    shown = capfd.readouterr().out
    results = last_line(shown)["results"]
    assert list(results) == ["vllm", "litellm", "ours"]
    assert "|  | vllm | litellm | ours |" in shown.splitlines()
    first, *others = (result["overload"]["levels"] for result in results.values())
    assert all(levels["capacity_requests_per_s"] == first["capacity_requests_per_s"] for levels in others)
    asked = {name: {asked.body.get("priority") for asked in fake.asked} for name, fake in endpoints.items()}
    assert asked == {"vllm": {None, 0, 1, 2}, "litellm": {None, 0, 1, 2}, "ours": {None, "high", "normal", "low"}}
    assert {asked.tenant for asked in endpoints["ours"].asked} == {"light", "heavy"}
    assert {asked.body.get("user") for asked in endpoints["litellm"].asked} == {"light", "heavy"}
    assert all(asked.body["ignore_eos"] for fake in endpoints.values() for asked in fake.asked)
