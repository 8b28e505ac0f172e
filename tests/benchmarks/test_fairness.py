"""VTC's figures against cases by hand and against plain sums; the simulated line, and the whole on a tiny trace."""

from __future__ import annotations

import dataclasses
import random
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fairness import main
from benchmarks.fairness.main import MANY, TWO, Plan, as_json, simulate
from benchmarks.fairness.metric import (
    WINDOW_S,
    Answer,
    Span,
    accumulated,
    demanded,
    differences,
    first_token_waits,
    judge,
    light_clients,
    p99,
    service_ratio,
    tokens_per_s,
)
from benchmarks.fairness.plot import plot
from benchmarks.fairness.simulation import ENGINE, FIFO, OURS, capacity, play
from benchmarks.fairness.trace import CLIENTS, HEAVY, LIGHT, Lengths, arrivals, skewed, two_clients
from tests.effort import examples

SVG = "{http://www.w3.org/2000/svg}"
LENGTHS = [Lengths(prompt, output) for prompt in (20, 100, 300) for output in (5, 40, 120)]
SMALL = dataclasses.replace(
    ENGINE, slots=8, kv_tokens=2_000, prefill_tokens_per_s=20_000.0, step_s=0.02, sequence_s=0.001
)


def served(client: str, first_s: float, seen_s: float, prompt: int, output: int, arrived_s: float = 0.0) -> Answer:
    return Answer(client, arrived_s, prompt, output, first_s, seen_s, output)


# The figures.


def test_a_request_is_served_evenly_between_its_first_token_and_its_end() -> None:
    answer = served("a", 10.0, 20.0, 60, 20)  # worth 100
    assert accumulated([answer], np.array([5.0, 10.0, 12.0, 20.0, 30.0])).tolist() == [[0.0, 0.0, 20.0, 100.0, 100.0]]


def test_a_request_of_one_token_is_served_at_that_moment() -> None:
    assert accumulated([served("a", 10.0, 10.0, 8, 1)], np.array([9.9, 10.0])).tolist() == [[0.0, 10.0]]


def test_what_was_cut_counts_as_far_as_it_came_and_what_waits_only_as_demand() -> None:
    cut = Answer("a", 0.0, 10, 100, 0.0, 10.0, 20)
    waits = Answer("b", 5.0, 10, 100)
    assert accumulated([cut, waits], np.array([10.0])).tolist() == [[50.0], [0.0]]
    assert demanded([cut, waits], np.array([0.0, 5.0, 6.0]), 5.0).tolist() == [[210.0, 0.0, 0.0], [0.0, 210.0, 0.0]]


@pytest.mark.parametrize(
    ("service", "asked", "difference"),
    [
        ([50, 50], [100, 200], 0),  # even
        ([30, 60], [100, 200], 30),  # the first is 30 behind, and wanted 70 more
        ([10, 60], [10, 200], 0),  # it got all it asked for
        ([10, 60], [25, 200], 15),  # it wanted 15 more
        ([10, 60], [0, 200], 10),  # late: 10 that it had asked for before
        ([10, 20, 60], [90, 90, 90], 90),  # 50 and 40
    ],
)
def test_a_windows_difference_by_hand(service: list[float], asked: list[float], difference: float) -> None:
    assert differences(np.array([service]).T, np.array([asked]).T).tolist() == [difference]


def test_first_come_first_served_of_one_to_two_by_hand() -> None:
    """Service of 10 and 20 a second, of 26 and 52 asked for: the first is behind by 10 of the 30 served."""
    answers = [served("one", at, at + 1.0, 10, 0, at) for at in np.arange(0.0, 200.0)]
    answers += [served("two", at, at + 1.0, 20, 0, at) for at in np.arange(0.0, 200.0)]
    more = [Answer(client, at, 16 * factor, 0) for client, factor in (("one", 1), ("two", 2)) for at in range(200)]
    found = judge([*answers, *more], Span(20.0, 180.0))
    assert found.service_ratio == pytest.approx(2.0)
    assert found.max_diff_over_rate == pytest.approx(1 / 3)
    assert found.mean_diff_over_rate == pytest.approx(1 / 3)
    assert found.tokens_per_s == pytest.approx(30.0)


def brute_force(answers: list[Answer], span: Span) -> tuple[float, float]:
    """The ratio and the largest difference over the rate, window by window and request by request."""

    def got(client: str, begin: float, end: float) -> float:
        total = 0.0
        for answer in answers:
            if answer.client == client and answer.first_s is not None and answer.seen_s is not None:
                overlap = max(0.0, min(end, answer.seen_s) - max(begin, answer.first_s))
                total += (answer.prompt_tokens + 2 * answer.served_tokens) * overlap / (answer.seen_s - answer.first_s)
        return total

    clients = {one.client for one in answers}
    whole = {client: got(client, span.begin_s, span.end_s) for client in clients}
    worst = 0.0
    begin = span.begin_s
    while begin + WINDOW_S <= span.end_s:
        end = begin + WINDOW_S
        here = {client: got(client, begin, end) for client in clients}
        asked = dict.fromkeys(clients, 0.0)
        for answer in answers:
            if begin <= answer.arrived_s < end:
                asked[answer.client] += answer.prompt_tokens + 2 * answer.output_tokens
        most = max(here.values())
        worst = max(worst, sum(min(most - here[client], abs(asked[client] - here[client])) for client in clients))
        begin += 5.0
    return max(whole.values()) / min(whole.values()), worst / WINDOW_S / (sum(whole.values()) / span.length_s)


@given(st.integers(0, 2**32))
@settings(max_examples=examples(30), deadline=None)
def test_the_figures_are_those_of_plain_sums(seed: int) -> None:
    draw = random.Random(seed)
    answers = [Answer("a", 0.0, 1, 1, 0.0, 200.0, 1), Answer("b", 0.0, 1, 1, 0.0, 200.0, 1)]
    for _ in range(60):
        at_s = draw.uniform(0, 180)
        prompt = draw.randint(1, 99)
        output = draw.randint(1, 99)
        first_s = at_s + draw.uniform(0, 50)
        answers.append(
            Answer(draw.choice("abc"), at_s, prompt, output, first_s, first_s + draw.uniform(0.1, 60), output)
        )
    answers.append(Answer("c", 0.0, 5, 5, 1.0, 190.0, 5))
    span = Span(20.0, 160.0)
    found = judge(answers, span)
    assert (found.service_ratio, found.max_diff_over_rate) == pytest.approx(brute_force(answers, span))
    draw.shuffle(answers)
    assert dataclasses.astuple(judge(answers, span)) == pytest.approx(dataclasses.astuple(found))


def test_a_span_without_room_for_a_window_or_without_service_has_no_figures() -> None:
    answers = [served("a", 0.0, 100.0, 10, 10)]
    assert Span(0.0, WINDOW_S).windows().tolist() == [0.0]
    with pytest.raises(ValueError, match="window"):
        judge(answers, Span(0.0, WINDOW_S - 1.0))
    with pytest.raises(ValueError, match="nobody"):
        tokens_per_s(answers, Span(200.0, 300.0))


def test_a_client_that_got_nothing_makes_the_ratio_infinite() -> None:
    assert service_ratio([served("a", 0.0, 1.0, 10, 10), Answer("b", 0.0, 10, 10)], Span(0.0, 1.0)) == float("inf")


def test_light_is_who_asks_for_less_than_an_equal_part() -> None:
    answers = [Answer("a", 0.0, 9, 0), Answer("b", 1.0, 11, 0), Answer("c", 2.0, 500, 0)]
    assert light_clients(answers, length_s=10.0, rate=3.0) == {"a"}


def test_no_wait_is_left_out() -> None:
    answers = [served("a", 3.0, 4.0, 1, 1, 1.0), served("b", 9.0, 9.5, 1, 1)]
    assert first_token_waits(answers, {"a"}) == [2.0]
    with pytest.raises(ValueError, match="no first token"):
        first_token_waits([*answers, Answer("a", 5.0, 1, 1)], {"a"})


def test_p99_by_hand() -> None:
    assert p99([float(number) for number in range(101)]) == pytest.approx(99.0)
    with pytest.raises(ValueError, match="no values"):
        p99([])


# The requests.


def test_a_trace_is_its_seed() -> None:
    assert two_clients(7, LENGTHS, 5.0, 60.0) == two_clients(7, LENGTHS, 5.0, 60.0)
    assert two_clients(7, LENGTHS, 5.0, 60.0) != two_clients(8, LENGTHS, 5.0, 60.0)


def test_clients_ask_by_their_demands_at_the_rate_asked_for() -> None:
    found = two_clients(1, LENGTHS, 50.0, 200.0)
    asks = [sum(one.tenant == client for one in found) for client in (LIGHT, HEAVY)]
    assert sum(asks) == pytest.approx(10_000, rel=0.03)
    assert asks[1] / asks[0] == pytest.approx(2.0, rel=0.06)
    assert all(one.at_s <= other.at_s < 200.0 for one, other in pairwise(found))


def test_the_skewed_trace_has_its_clients_and_its_shape() -> None:
    found = skewed(1, LENGTHS, 100.0, 200.0)
    counts = sorted((sum(one.tenant == each for one in found) for each in {one.tenant for one in found}), reverse=True)
    assert len(counts) == CLIENTS
    assert [count / len(found) for count in counts[:2]] == pytest.approx([0.332, 0.144], abs=0.01)


# The simulated line.


def test_a_run_is_a_function_of_its_requests() -> None:
    requests = two_clients(3, LENGTHS, 20.0, 30.0)
    assert play(requests, OURS, SMALL) == play(requests, OURS, SMALL)


@pytest.mark.parametrize("arm", [FIFO, OURS], ids=lambda arm: arm.name)
def test_every_request_is_served_whole_and_none_before_it_came(arm: main.Arm) -> None:
    requests = two_clients(3, LENGTHS, 20.0, 30.0)
    answers = play(requests, arm, SMALL).answers
    assert [(one.client, one.arrived_s) for one in answers] == [(one.tenant, one.at_s) for one in requests]
    assert all(one.served_tokens == one.output_tokens for one in answers)
    assert all(one.first_s is not None and one.arrived_s < one.first_s for one in answers)


def test_one_tenant_for_all_is_order_of_arrival_but_for_messages_of_routers() -> None:
    answers = play(two_clients(4, LENGTHS, 40.0, 20.0), FIFO, SMALL).answers
    firsts = [one.first_s for one in answers]
    assert all(one is not None for one in firsts)
    assert sum(later < one for one, later in pairwise(firsts)) < 0.03 * len(firsts)  # type: ignore[operator]


def test_an_engine_that_is_never_idle_ends_as_many_as_it_can() -> None:
    per_s = capacity(LENGTHS, SMALL, 30.0)
    assert play(arrivals(2, LENGTHS, {"a": 1.0}, 0.5 * per_s, 60.0), FIFO, SMALL).ended_s < 64.0  # keeps up
    twice = play(arrivals(2, LENGTHS, {"a": 1.0}, 2.0 * per_s, 60.0), FIFO, SMALL)
    assert twice.ended_s == pytest.approx(120.0, rel=0.1)  # takes twice as long


# The whole.


def test_the_benchmark_on_a_tiny_trace_tells_fair_from_order_of_arrival() -> None:
    plan = Plan((1, 2), length_s=90.0, warm_s=20.0, capacity_s=30.0, engine=SMALL)
    reported: list[str] = []
    found = as_json(simulate(LENGTHS, plan, reported.append))
    assert len(reported) == 3
    assert set(found["keys"][OURS.name]) >= set(main.BARS)
    assert found["keys"][FIFO.name]["service_ratio"] == pytest.approx(2.0, rel=0.15)
    assert found["keys"][FIFO.name]["throughput_over_fifo"] == found["keys"][FIFO.name]["light_ttft_p99_gain"] == 1.0
    assert 1.0 <= found["keys"][OURS.name]["service_ratio"] < 1.05
    assert found["keys"][OURS.name]["max_diff_over_rate"] < found["keys"][FIFO.name]["max_diff_over_rate"] / 2
    assert found["keys"][OURS.name]["light_ttft_p99_gain"] > 1.5
    for name in (TWO, MANY):
        spread = found[name][OURS.name]["max_diff_over_rate"]
        assert spread["least"] <= spread["median"] <= spread["most"]


def plan(*arguments: str) -> Plan:
    return main.plan_of(main.parser_of().parse_args(arguments))


def test_the_command_line_names_the_seeds() -> None:
    assert plan("--seeds", "3", "--seed", "5").seeds == (5, 6, 7)


# The picture.


def test_the_picture_has_a_line_for_each_client_of_each_arm_on_one_scale(tmp_path: Path) -> None:
    arms = {
        "fifo": [served("a", 0.0, 10.0, 0, 50), served("<b>", 0.0, 10.0, 0, 100)],
        "ours": [served("a", 0.0, 10.0, 0, 75)],
    }
    file = tmp_path / "plot.svg"
    plot(arms, 0.0, 10.0, "a & b", file)
    root = ET.parse(file).getroot()
    # the clients' lines; those of the grid and of the legend are black or short
    paths = [path for path in root.iter(SVG + "path") if path.attrib.get("d", "").count("L") > 2]
    ends = [float(path.attrib["d"].split()[-1]) for path in paths if "clip-path" in path.attrib]
    assert len(ends) == 3
    assert ends[0] < ends[2] < ends[1]  # "<b>" sorts first and got 200, "a" 100, in the other panel 150
    texts = {text.text for text in root.iter(SVG + "text")}
    assert {"a & b", "<b>", "a", "fifo", "ours"} <= texts
    before = file.read_bytes()
    plot(arms, 0.0, 10.0, "a & b", file)
    assert file.read_bytes() == before


def test_nothing_served_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        plot({"fifo": [Answer("a", 0.0, 1, 1)]}, 0.0, 1.0, "", tmp_path / "plot.svg")
    assert not list(tmp_path.iterdir())
