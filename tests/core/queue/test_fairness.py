"""How the line divides what there is between classes and tenants, on simulated engines."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import INPUT_WEIGHT, OUTPUT_WEIGHT, Admission, TenantPolicy
from serve_app.core.queue.policy import DEFAULT_MIN_SHARE, MAX_WEIGHT, MIN_WEIGHT
from tests.core.queue.events import CRITICAL, HIGH, LOW, NORMAL, admission, arrival, arrive, of, where
from tests.core.queue.simulated_engines import Shop, make_shop, patient
from tests.effort import examples

MAX_PROMPT = 60
MAX_OUTPUT = 40
seeds = st.integers(0, 2**32)


def differences(shop: Shop, weights: dict[str, float], steps: int, draw: random.Random) -> list[float]:
    """The difference of two tenants' service over their weights after each step, both always waiting."""
    first, other = weights
    found = [0.0]

    def refill() -> None:
        for tenant in weights:
            longest = MAX_OUTPUT if tenant == first else MAX_OUTPUT // 4
            shop.keep_waiting(
                tenant,
                lambda: shop.arrive(tenant, NORMAL, draw.randint(1, MAX_PROMPT), draw.randint(1, longest)),  # noqa: B023
                count=16,
            )

    refill()
    for _ in range(steps):
        shop.step(refill)
        service = shop.service
        found.append(service.get(first, 0.0) / weights[first] - service.get(other, 0.0) / weights[other])
    return found


@given(seeds, st.sampled_from([1.0, 2.0, 0.5]), st.integers(1, 12))
@settings(max_examples=examples(25), deadline=None)
def test_service_of_two_who_always_wait_differs_by_no_more_than_the_papers_bound(
    seed: int, weight: float, slots: int
) -> None:
    """VTC, theorem 4.4: twice the larger of a prompt's weight and that of all tokens a batch can hold."""
    kv_tokens = slots * (MAX_PROMPT + MAX_OUTPUT)
    policy = patient(tenants={"b": TenantPolicy(weight)})
    shop = make_shop(policy, slots, kv_tokens)
    seen = differences(shop, {"a": 1.0, "b": weight}, 400, random.Random(seed))
    bound = 2 * max(INPUT_WEIGHT * MAX_PROMPT, OUTPUT_WEIGHT * kv_tokens) / min(1.0, weight)
    assert max(seen) - min(seen) <= bound


def test_weights_divide_a_class() -> None:
    shop = make_shop(patient(tenants={"b": TenantPolicy(3.0)}))
    differences(shop, {"a": 1.0, "b": 3.0}, 4000, random.Random(3))
    assert shop.service["b"] / shop.service["a"] == pytest.approx(3.0, rel=0.05)


def test_tenants_of_the_extreme_weights_come_and_go_and_the_lightest_is_still_served() -> None:
    heaviest = TenantPolicy(MAX_WEIGHT)
    tenants = {"light": TenantPolicy(MIN_WEIGHT)} | {f"heavy-{number}": heaviest for number in range(64)}
    queue = Admission(patient(tenants=tenants))
    set_replica(queue, "a", 1, 0.0)
    arrive(queue, "runs", cls=HIGH)
    queue.on_arrive(of("light", "waits"), 0.0)
    for number in range(64):
        queue.on_arrive(of(f"heavy-{number}", f"h{number}"), 0.0)
    for number in range(64):
        assert queue.on_cancel(f"h{number}", 1.0) == []
    arrive(queue, "next", cls=HIGH)
    assert where(queue.on_done("runs", 2.0)) == {"next": "a"}  # its tokens are divided by the weight of those who wait
    assert where(queue.on_done("next", 3.0)) == {"waits": "a"}


def test_demand_of_one_to_two_in_overload_is_served_one_to_one() -> None:
    shop = make_shop()
    draw = random.Random(1)
    for step in range(3000):
        for tenant, every in (("a", 4), ("b", 2)):
            if step % every == 0:
                shop.arrive(tenant, NORMAL, 20, draw.randint(20, 60))
        shop.step()
    assert shop.service["b"] / shop.service["a"] == pytest.approx(1.0, rel=0.05)


def test_light_tenant_is_not_delayed_by_a_heavy_one() -> None:
    shop = make_shop(slots=4)
    for _ in range(1000):
        shop.arrive("heavy")
    for _ in range(40):
        light = shop.arrive("light")
        for _ in range(25):
            shop.step()
        # two answers of ten steps: the next turn or the one after
        assert shop.waited_s[light] <= 2 * 10 * shop.step_s
    assert len(shop.waits) > 500


def test_idle_time_is_not_saved_up() -> None:
    shop = make_shop(slots=1)
    for _ in range(50):
        shop.arrive("busy")
    for _ in range(200):
        shop.step()
    shop.order.clear()
    for _ in range(20):
        shop.arrive("back")
    for _ in range(120):
        shop.step()
    turns = [one.tenant for one in shop.order]
    assert abs(turns.count("busy") - turns.count("back")) <= 1


def test_a_tenant_whose_requests_turn_out_short_gets_more_of_them() -> None:
    queue = admission(a=1)
    queue.on_arrive(arrival("running"), 0.0)
    for turn in range(3):
        for tenant in ("long", "short"):
            queue.on_arrive(of(tenant, f"{tenant}{turn}"), 0.0)
    order = []
    running = "running"
    while actions := queue.on_done(running, 1.0, 10, 100 if running.startswith("long") else 1):
        running = actions[0].request_id
        order.append(running.rstrip("012"))
    assert order == ["long", "short", "short", "short", "long", "long"]


def test_output_counts_while_it_is_produced() -> None:
    queue = admission(a=2)
    queue.on_arrive(of("a", "a1"), 0.0)
    queue.on_arrive(of("b", "b1"), 0.0)
    for name in ("a2", "b2"):
        queue.on_arrive(of(name[0], name), 0.0)
    queue.on_progress("a1", 5, 1.0)
    assert where(queue.on_done("b1", 1.0, 10, 2)) == {"b2": "a"}


def test_a_prompt_counts_as_its_engine_has_counted_it_while_it_runs_and_once() -> None:
    queue = admission(a=2)
    queue.on_arrive(of("a", "a1"), 0.0)
    queue.on_arrive(of("b", "b1"), 0.0)
    for name in ("a2", "b2", "b3"):
        queue.on_arrive(of(name[0], name), 0.0)
    queue.on_progress("a1", 1, 1.0, 100_000)
    assert where(queue.on_done("b1", 1.0, 90_000, 2)) == {"b2": "a"}
    assert where(queue.on_done("a1", 1.0, 100_000, 1)) == {"b3": "a"}  # 100,003 against 90,022


def test_without_a_word_of_its_use_a_request_has_cost_its_estimate() -> None:
    queue = admission(a=1)
    queue.on_arrive(of("a", "a1"), 0.0)
    for name in ("a2", "b1", "b2", "b3", "b4"):
        queue.on_arrive(of(name[0], name), 0.0)
    order = []
    running = "a1"
    while actions := queue.on_done(running, 1.0, 10, None if running == "a1" else 10):
        running = actions[0].request_id
        order.append(running)
    assert order == ["b1", "b2", "b3", "b4", "a2"]  # 10 + 2 x 50 are about four times 10 + 2 x 10


def test_who_turns_out_to_have_paid_too_much_goes_before_those_it_let_pass() -> None:
    queue = Admission(patient())
    set_replica(queue, "a", 2, 0.0)
    queue.on_arrive(of("guessed", "g0", prompt=1000), 0.0)
    queue.on_arrive(of("usual", "u0", prompt=200), 0.0)
    for turn in range(1, 4):
        queue.on_arrive(of("usual", f"u{turn}", prompt=200), 0.0)
        queue.on_arrive(of("guessed", f"g{turn}", prompt=1000), 0.0)
    assert where(queue.on_done("u0", 1.0, 200, 0)) == {"u1": "a"}
    assert where(queue.on_done("g0", 1.0, 10, 0)) == {"g1": "a"}  # 990 of its 1,000 tokens of input were none
    assert where(queue.on_done("u1", 1.0, 200, 0)) == {"u2": "a"}  # 400 are fewer than 10 + 1,000
    assert where(queue.on_done("g1", 1.0, 10, 0)) == {"g2": "a"}  # 20 are fewer than 400 + 200


# Between classes.


@given(seeds)
@settings(max_examples=examples(40), deadline=None)
def test_without_a_minimum_share_no_class_runs_before_a_higher_one_that_waits(seed: int) -> None:
    draw = random.Random(seed)
    shop = make_shop(patient(min_share=0.0), slots=3)
    for _ in range(300):
        if draw.random() < 0.4:
            shop.arrive(draw.choice("abc"), draw.choice([LOW, NORMAL, HIGH, CRITICAL]), 5, draw.randint(1, 12))
        waited = {one.request_class for one in shop.waits.values()}
        granted = len(shop.order)
        shop.step()
        for name in shop.order[granted:]:
            assert name.request_class == max(waited)
            waited = {left.request_class for left in shop.waits.values()} | {
                later.request_class for later in shop.order[granted + 1 :]
            }
            granted += 1


@given(seeds, st.sampled_from([DEFAULT_MIN_SHARE, 0.2]))
@settings(max_examples=examples(25), deadline=None)
def test_each_class_that_waits_gets_its_minimum_share_in_any_stretch_and_hardly_more(seed: int, share: float) -> None:
    draw = random.Random(seed)
    shop = make_shop(patient(min_share=share), slots=4)
    most = 60
    bound = (1 + 3 * share) * most  # its own cost, and what it earns by the grant that makes it due and two others due
    for _ in range(600):
        for cls in (LOW, NORMAL, HIGH):
            while sum(one.request_class == cls for one in shop.waits.values()) < 5:
                shop.arrive(cls.label, cls, draw.randint(1, 40), draw.randint(1, most - 40))
        shop.step()
    for cls in (LOW, NORMAL):
        # what it was granted less its share, now and at its extremes
        balance = 0.0
        lowest = 0.0
        highest = 0.0
        for name in shop.order[4:]:
            balance += (name.cost if name.request_class == cls else 0) - share * name.cost
            assert balance - highest >= -bound  # a stretch that began at the highest point was the worst
            assert balance - lowest <= bound
            lowest = min(lowest, balance)
            highest = max(highest, balance)
    assert len(shop.order) > 100


def test_the_minimum_share_is_lost_when_nobody_waits_any_more() -> None:
    queue = admission(a=1)
    queue.on_arrive(of("t", "running"), 0.0)
    queue.on_arrive(arrival("low", LOW, cost_tokens=10), 0.0)
    running = "running"
    for turn in range(3):  # three of 60 tokens earn it 9 of the 10 it costs
        queue.on_arrive(of("t", f"n{turn}"), 0.0)
        running = queue.on_done(running, 0.0)[0].request_id
    queue.on_cancel("low", 0.0)
    queue.on_arrive(arrival("again", LOW, cost_tokens=10), 0.0)
    for turn in range(3, 7):
        queue.on_arrive(of("t", f"n{turn}"), 0.0)
        running = queue.on_done(running, 0.0)[0].request_id
        assert running == f"n{turn}"
    queue.on_arrive(of("t", "n7"), 0.0)
    assert where(queue.on_done(running, 0.0)) == {"again": "a"}


def test_what_a_class_was_granted_in_its_own_turn_is_no_debt_when_a_higher_one_comes() -> None:
    queue = Admission(patient())
    set_replica(queue, "a", 1, 0.0)
    queue.on_arrive(of("t", "n0"), 0.0)
    for turn in range(1, 60):
        queue.on_arrive(of("t", f"n{turn}"), 0.0)
    for turn in range(20):
        queue.on_done(f"n{turn}", 0.0)
    running = "n20"
    granted = []
    for turn in range(25):
        queue.on_arrive(of("t", f"h{turn}", HIGH), 0.0)
        running = queue.on_done(running, 0.0)[0].request_id
        granted.append(running)
    assert [name for name in granted if name.startswith("n")] == ["n21"]  # 20 of the same cost earn it one


def test_a_class_earns_nothing_while_its_turn_finds_no_room() -> None:
    queue = Admission(patient(min_share=0.3))
    set_replica(queue, "a", 4, 0.0)
    set_replica(queue, "b", 1, 0.0)
    for name in "pqrs":
        queue.on_arrive(arrival(name, HIGH, affinity="a"), 0.0)
    arrive(queue, "h0", cls=HIGH)
    queue.on_arrive(arrival("large", LOW, slots=4), 0.0)
    arrive(queue, *(f"l{number}" for number in range(20)), cls=LOW)
    arrive(queue, *(f"h{number}" for number in range(1, 80)), cls=HIGH)
    queue.on_done("p", 0.0)
    for number in range(40):  # "large" is due after four of them, and waits for the rest of "a"
        assert not {name for name in where(queue.on_done(f"h{number}", 0.0)) if name.startswith("l")}
    for name in "qrs":
        queue.on_done(name, 0.0)
    granted = where([action for name in ("h1", "h2", "h41", "h42") for action in queue.on_done(name, 0.0)])
    assert sum(name.startswith("l") for name in granted) <= 2, "it has saved up"


def test_a_due_request_of_the_minimum_share_that_is_large_is_not_starved_by_higher_classes() -> None:
    queue = Admission(patient(min_share=0.3))
    set_replica(queue, "a", 4, 0.0)
    arrive(queue, *"pqrs", cls=HIGH)
    queue.on_arrive(arrival("large", LOW, slots=4), 0.0)
    arrive(queue, *(f"h{number}" for number in range(20)), cls=HIGH)
    running = list("pqrs")
    granted = []
    for _ in range(8):
        actions = queue.on_done(running.pop(0), 1.0)
        granted += [action.request_id for action in actions]
        running += [action.request_id for action in actions]
    assert granted[-1] == "large"  # four that ran ended one by one, and nobody took their slots meanwhile


# Guaranteed shares.


@given(seeds, st.sampled_from([0.1, 0.25, 0.5]), st.booleans())
@settings(max_examples=examples(25), deadline=None)
def test_a_guaranteed_share_is_reached_within_two_seconds_of_answers_as_long(
    seed: int, share: float, bounded: bool
) -> None:
    draw = random.Random(seed)
    kv_tokens = 20 * 30 if bounded else None  # of which each request takes 30 at most
    shop = make_shop(patient(tenants={"owner": TenantPolicy(share=share)}), 20, kv_tokens, step_s=0.1)

    def borrowers() -> None:
        for tenant in ("x", "y"):
            shop.keep_waiting(tenant, lambda: shop.arrive(tenant, NORMAL, 10, draw.randint(1, 20)), 30)  # noqa: B023

    def all_of_them() -> None:
        borrowers()
        shop.keep_waiting("owner", lambda: shop.arrive("owner", NORMAL, 10, draw.randint(1, 20)), 30)

    borrowers()
    for _ in range(50):
        shop.step(borrowers)
    assert shop.slots("x") + shop.slots("y") == len(shop.running) >= 19  # what nobody wants is lent
    all_of_them()
    for _ in range(20):  # two seconds: no answer takes longer
        shop.step(all_of_them)
    for _ in range(100):
        used = shop.queue.snapshot(shop.now).tenants["owner"]
        assert used.slots >= share * 20 or (kv_tokens is not None and used.kv_tokens >= share * kv_tokens)
        shop.step(all_of_them)


def test_a_guarantee_does_not_pass_a_higher_class() -> None:
    queue = Admission(patient(tenants={"owner": TenantPolicy(share=0.5)}))
    set_replica(queue, "a", 2, 0.0)
    arrive(queue, "p", "q")
    queue.on_arrive(of("owner", "mine"), 0.0)
    arrive(queue, "urgent", cls=HIGH)
    assert where(queue.on_done("p", 1.0)) == {"urgent": "a"}
    assert where(queue.on_done("q", 1.0)) == {"mine": "a"}


def test_beyond_its_share_a_tenant_is_one_of_many() -> None:
    queue = Admission(patient(tenants={"owner": TenantPolicy(share=0.25)}))
    set_replica(queue, "a", 8, 0.0)
    for number in range(8):
        queue.on_arrive(of("x", f"r{number}"), 0.0)
    for number in range(20):
        queue.on_arrive(of("owner", f"o{number}"), 0.0)
        queue.on_arrive(of("x", f"x{number}"), 0.0)
        queue.on_arrive(of("y", f"y{number}"), 0.0)
    granted = [name[0] for number in range(8) for name in where(queue.on_done(f"r{number}", 1.0, 10, 50))]
    assert granted[:2] == ["o", "o"]
    assert granted.count("o") <= 4
    assert granted.count("y") >= 3
    queue.on_done("o0", 2.0, 10, 50)
    assert queue.snapshot(2.0).tenants["owner"].slots >= 2


def test_a_share_follows_the_policy_and_the_replicas() -> None:
    queue = admission(a=2)
    arrive(queue, "p", "q", "first")
    queue.on_arrive(of("owner", "mine"), 0.0)
    assert not queue.snapshot(0.0).tenants["owner"].below_share
    assert queue.on_policy(policy_with(queue, owner=TenantPolicy(share=0.4)), 1.0) == []
    assert queue.snapshot(1.0).tenants["owner"].below_share
    assert where(queue.on_done("p", 1.0)) == {"mine": "a"}
    assert not queue.snapshot(1.0).tenants["owner"].below_share
    set_replica(queue, "a", 3, 2.0)  # of three slots it has less than 40% with one
    assert queue.snapshot(2.0).tenants["owner"].below_share


def policy_with(queue: Admission, **tenants: TenantPolicy) -> Any:
    return dataclasses.replace(queue.scheduler.policy, tenants=tenants)


def test_who_comes_does_not_wait_for_service_that_another_only_seemed_to_need() -> None:
    """Prompts that are truncated are estimated at 50,000 tokens and have 5. Who came while one of them ran was raised
    to its charge, and waited for 10,000 more of them."""
    queue = Admission(patient())
    set_replica(queue, "r", 8, 0.0, kv_tokens=60_000)
    running = where(queue.on_arrive(of("many", "m0", prompt=50_000, output=0), 0.0))
    for number in range(1, 6):
        queue.on_arrive(of("many", f"m{number}", prompt=50_000, output=0), 0.0)
    queue.on_arrive(of("one", "o", prompt=20_000, output=0), 1.0)
    assert list(running) == ["m0"]
    assert list(where(queue.on_done("m0", 2.0, prompt_tokens=5, output_tokens=0))) == ["o"]
