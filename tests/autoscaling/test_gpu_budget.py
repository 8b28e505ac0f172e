"""One bound of GPUs for all models: never exceeded, nothing taken away, and the neediest first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.policies import BudgetedModel, Cause, Decision, within_gpu_budget
from tests.effort import examples

models = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 12), st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 4.0])), max_size=6
)


def model(name: str, target: int, wanted: int, gpus: float) -> BudgetedModel:
    return BudgetedModel(name, target, Decision(wanted, 0.0, f"{wanted} wanted"), gpus)


@given(models=models, max_gpus=st.floats(0.0, 40.0))
@settings(max_examples=examples(200))
def test_the_bound_holds_and_nothing_is_taken_away(models: list[tuple[int, int, float]], max_gpus: float) -> None:
    given_models = [model(f"m{number}", *values) for number, values in enumerate(models)]
    found = within_gpu_budget(given_models, max_gpus)
    before = sum(each.target * each.gpus for each in given_models)
    after = sum(max(each.target, found[each.name].replicas) * each.gpus for each in given_models)
    assert after <= max(before, max_gpus) + 1e-6
    free = max_gpus - after
    for each in given_models:
        decision = found[each.name]
        assert min(each.target, each.decision.replicas) <= decision.replicas <= each.decision.replicas
        if decision.replicas < each.decision.replicas:
            assert decision.cause is Cause.MAX_GPUS
            assert each.gpus > free - 1e-6, "another would have fitted"


def test_the_model_that_lacks_the_larger_part_gets_the_next_replica() -> None:
    found = within_gpu_budget([model("a", 2, 3, 1.0), model("b", 2, 10, 1.0)], 8.0)
    assert {name: decision.replicas for name, decision in found.items()} == {"a": 2, "b": 6}
    assert found["a"].reason == "3 wanted; 1 not started: scaling.max_gpus is 8 for all models"


def test_a_replica_of_fewer_gpus_comes_first_where_as_much_lacks() -> None:
    found = within_gpu_budget([model("large", 1, 2, 4.0), model("small", 1, 2, 1.0)], 9.0)
    assert {name: decision.replicas for name, decision in found.items()} == {"large": 1, "small": 2}


def test_what_is_to_end_still_has_its_gpus() -> None:
    found = within_gpu_budget([model("a", 4, 1, 1.0), model("b", 0, 4, 1.0)], 6.0)
    assert (found["a"].replicas, found["b"].replicas) == (1, 2)


@pytest.mark.parametrize("max_gpus", [3.0, 100.0])
def test_with_enough_nothing_changes(max_gpus: float) -> None:
    asked = [model("a", 1, 2, 1.0), model("b", 1, 1, 1.0)]
    assert within_gpu_budget(asked, max_gpus) == {each.name: each.decision for each in asked}
