"""The moments and figures of `benchmarks.scaling`, from looks and cycles made by hand."""

from __future__ import annotations

import pytest

from benchmarks.scaling.flapping import POLICIES, figures, flapping
from benchmarks.scaling.flapping import configuration as flapping_configuration
from benchmarks.scaling.linear import configuration as linear_configuration
from benchmarks.scaling.linear import linear
from benchmarks.scaling.linear import result as scaled
from benchmarks.scaling.main import STEPS, Cycle, Rise, configuration, parse_arguments, result, table
from benchmarks.scaling.watch import Look, first, read
from serve_app.settings import parse


def look(at: float, target: int, **replicas: str) -> Look:
    states = {name: (state, state != "STARTING") for name, state in replicas.items()}
    return Look(at, target, states, ongoing=0, waiting=0, why="")


def cycle(total: float = 10.0, failures: tuple[str, ...] = ()) -> Cycle:
    rise = Rise(decided=2.0, placed=5.0, works=total)
    return Cycle(rise, rise, (1, 2, 3, 1, 0, 1), 40, failures)


def test_a_line_of_the_child_is_a_look_at_each_model() -> None:
    replicas = [{"id": "a", "state": "RUNNING", "node": "n1"}, {"id": "b", "state": "STARTING", "node": ""}]
    model = {"name": "m", "target": 2, "replicas": replicas, "ongoing": 3, "waiting": 1, "why": "so"}
    seen = read({"event": "look", "at": 5.0, "models": [model]})["m"]
    assert (seen.at, seen.target, seen.ongoing, seen.waiting, seen.why) == (5.0, 2, 3, 1, "so")
    assert (seen.running, seen.placed) == ({"a"}, {"a"})


def test_the_first_look_for_which_something_holds_is_not_before_the_moment_given() -> None:
    looks = [look(1.0, 2), look(2.0, 1), look(3.0, 2), look(4.0, 2)]
    found = first(looks, 1.5, lambda look: look.target == 2)
    assert found is not None
    assert found.at == 3.0
    assert first(looks, 4.5, lambda look: True) is None


def test_the_parts_of_a_rise_add_up() -> None:
    reported = Rise(decided=2.0, placed=5.5, works=9.25).as_json()
    assert reported == {"total": 9.25, "decision": 2.0, "placement": 3.5, "engine_start": 3.75}
    assert tuple(reported) == STEPS


def test_the_result_holds_medians_and_every_cycle() -> None:
    reported = result([cycle(10.0), cycle(30.0), cycle(12.0)])
    assert reported["first_extra_replica_s"]["total"] == 12.0
    assert [one["total"] for one in reported["from_zero_s"]["cycles"]] == [10.0, 30.0, 12.0]
    assert reported["replicas_seen"] == [[1, 2, 3, 1, 0, 1]] * 3
    assert (reported["failed"], reported["answered"]) == (0, 120)
    assert table(reported).row_count == 2


def test_scaling_is_linear_if_every_number_of_replicas_reaches_its_part_of_the_first_ones_rate() -> None:
    rates = {1: 2.0, 2: 4.0, 4: 7.6, 8: 14.8}
    printed: list[str] = []
    found = linear(printed.append, rates.__getitem__)
    assert (found["verdict"], found["share_of_linear"]["8"], len(printed)) == ("confirmed", 0.925, 4)
    assert scaled(rates | {8: 14.0})["verdict"] == "refuted"
    assert parse(linear_configuration(8)).models[0].replicas.max_replicas == 8


def test_a_failed_request_is_in_the_result() -> None:
    assert result([cycle(), cycle(failures=("503",))])["failed"] == 1


@pytest.mark.parametrize("engine", ["vllm", "simulated"])
def test_what_is_measured_is_a_configuration(engine: str) -> None:
    (model,) = parse(configuration(engine)).models
    assert (model.engine, model.replicas.min_replicas, model.replicas.max_replicas) == (engine, 0, 3)


def test_quick_is_one_cycle() -> None:
    assert parse_arguments([]).cycles == 3
    assert parse_arguments(["--quick"]).cycles == 1
    assert parse_arguments(["--quick", "--cycles", "2"]).cycles == 2


def test_actions_and_hours_of_a_flapping_load_are_those_of_the_looks() -> None:
    looks = [look(0.0, 1, a="RUNNING"), look(1800.0, 2, a="RUNNING", b="STARTING"), look(3600.0, 2, a="RUNNING")]
    assert figures(looks) == {"actions": 1, "replica_hours": 1.5, "targets": [1, 2]}
    assert flapping(lambda text: None, lambda policy: {"policy": policy})["slo"] == {"policy": "slo"}
    assert {model.replicas.policy for name in POLICIES for model in parse(flapping_configuration(name)).models} == {
        *POLICIES
    }
