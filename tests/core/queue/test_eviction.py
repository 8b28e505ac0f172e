"""Who gives a place back in a full line, and whose place is safe."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Admission, ClassBound, QueuePolicy, Refuse, TenantPolicy
from serve_app.core.queue.cold_start import DEFAULT_REMAINING_S
from serve_app.types import RequestClass
from tests.core.queue.events import CRITICAL, HIGH, LOW, NORMAL, arrive, of, where


def full(max_queued: int = 100, cls: RequestClass = CRITICAL, **more: Any) -> Admission:
    """A line whose one slot is taken, by a request of this class."""
    admission = Admission(QueuePolicy(max_queued, 1000.0, **more))
    set_replica(admission, "a", 1, 0.0)
    admission.on_arrive(of("x", "running", cls), 0.0)
    return admission


def come(admission: Admission, *arrivals: Any, now: float = 0.0) -> dict[str, str]:
    return where([action for one in arrivals for action in admission.on_arrive(one, now)])


def test_a_heavy_tenant_gives_its_youngest_to_a_light_one_of_its_class() -> None:
    admission = full(4)
    assert come(admission, *(of("heavy", f"h{number}") for number in range(4))) == {}
    assert come(admission, of("light", "l0")) == {"h3": "shed"}
    assert come(admission, of("heavy", "h4")) == {"h4": "queue_full"}
    assert come(admission, of("light", "l1")) == {"h2": "shed"}
    assert come(admission, of("light", "l2")) == {"l2": "queue_full"}  # each has two now
    assert come(admission, of("third", "t0")) == {"h1": "shed"}


def test_weights_say_who_is_heavy() -> None:
    admission = full(4, tenants={"big": TenantPolicy(3.0)})
    come(admission, *(of("big", f"b{number}") for number in range(3)), of("small", "s0"))
    assert come(admission, of("small", "s1")) == {"s1": "queue_full"}
    assert come(admission, of("big", "b3")) == {"b3": "queue_full"}
    assert come(admission, of("other", "o0")) == {
        "o0": "queue_full"
    }  # three have for their weight what one has for its


def test_the_lowest_class_gives_first_and_in_it_the_heaviest_tenant() -> None:
    admission = full(5)
    come(admission, of("n", "n0"), of("n", "n1"), of("p", "l0", LOW), of("q", "l1", LOW), of("p", "l2", LOW))
    assert come(admission, of("z", "h0", HIGH)) == {"l2": "shed"}
    assert come(admission, of("z", "h1", HIGH)) in ({"l0": "shed"}, {"l1": "shed"})
    come(admission, of("z", "h2", HIGH))
    assert come(admission, of("z", "h3", HIGH)) == {"n1": "shed"}


def test_what_was_accepted_is_neither_refused_nor_shed() -> None:
    admission = full(1)
    assert come(admission, of("p", "again", LOW, accepted=True), of("p", "more", LOW, accepted=True)) == {}
    assert come(admission, of("q", "h0", HIGH)) == {"h0": "queue_full"}


def test_tokens_are_bounded_beside_requests() -> None:
    admission = full(max_queued_tokens=150)
    assert come(admission, of("p", "p0", output=50), of("p", "p1", output=50)) == {}
    assert come(admission, of("p", "p2", output=50)) == {"p2": "queue_full"}
    assert come(admission, of("p", "p3", output=20)) == {}
    assert admission.queue.tokens == 150


def test_by_tokens_the_tenant_with_most_of_them_gives() -> None:
    admission = full(max_queued_tokens=300)
    come(admission, of("many", "m0", output=10), of("many", "m1", output=10), of("many", "m2", output=10))
    come(admission, of("large", "l0", output=90), of("large", "l1", output=110))
    assert come(admission, of("new", "n0", output=40)) == {"l1": "shed"}


def test_nobody_goes_where_it_would_not_make_enough_room() -> None:
    admission = full(max_queued_tokens=100)
    come(admission, of("p", "l0", LOW, output=10), of("p", "n0", output=70))
    before = admission.snapshot(0.0)
    assert come(admission, of("q", "n1", output=90)) == {"n1": "queue_full"}
    assert admission.snapshot(0.0).classes == before.classes


def test_several_small_ones_of_a_lower_class_give_way_to_a_large_one() -> None:
    admission = full(max_queued_tokens=100)
    come(admission, *(of("p", f"l{number}", LOW, output=10) for number in range(5)))
    assert come(admission, of("q", "n0", output=50)) == {"l4": "shed", "l3": "shed", "l2": "shed"}


def test_a_class_has_a_bound_of_its_own_that_no_other_class_pays_for() -> None:
    admission = full(classes={HIGH: ClassBound(1, None), LOW: ClassBound(None, 70)})
    assert come(admission, of("p", "l0", LOW), of("p", "h0", HIGH), of("p", "n0"), of("p", "n1")) == {}
    assert come(admission, of("p", "h1", HIGH)) == {"h1": "queue_full"}
    assert come(admission, of("p", "l1", LOW)) == {"l1": "queue_full"}
    assert come(admission, of("p", "l2", LOW, output=0)) == {}


def test_a_light_tenants_deadline_is_not_refused_for_a_heavy_ones_queue() -> None:
    admission = full(100, NORMAL)
    admission.on_done("running", 2.0)
    admission.on_arrive(of("heavy", "first"), 2.0)
    come(admission, *(of("heavy", f"h{number}") for number in range(50)), now=2.0)
    admission.on_done("first", 4.0)  # two seconds each
    assert come(admission, of("heavy", "late", deadline=50.0), now=4.0) == {"late": "deadline"}
    assert come(admission, of("light", "soon", deadline=12.0), now=4.0) == {}


def test_retry_after_follows_the_drain_of_the_class_and_the_tenants_own_place() -> None:
    admission = full(52, NORMAL)
    admission.on_done("running", 2.0)
    admission.on_arrive(of("heavy", "first"), 2.0)
    come(admission, *(of("heavy", f"h{number}") for number in range(52)), now=2.0)
    admission.on_done("first", 4.0)
    come(admission, of("heavy", "h52"), of("heavy", "h53"), now=4.0)
    (heavy,) = admission.on_arrive(of("heavy", "h54"), 4.0)
    (shed,) = admission.on_arrive(of("light", "l0"), 4.0)
    assert isinstance(heavy, Refuse)
    assert isinstance(shed, Refuse)
    assert heavy.retry_after_s == pytest.approx(2.0 * 53, rel=0.1)
    assert admission.forecast.arrival_wait_s(NORMAL, 1, "light") == pytest.approx(2.0 * 4, rel=0.1)
    low = admission.forecast.arrival_wait_s(LOW, 1, "other")
    assert low is not None
    assert low == pytest.approx(2.0 / 0.05, rel=0.1)  # by its minimum share, before all above


# Where a request stands.


def test_position_counts_higher_classes_own_earlier_ones_and_the_others_fair_part() -> None:
    admission = full(tenants={"double": TenantPolicy(2.0)})
    come(admission, *(of("heavy", f"h{number}") for number in range(20)), of("z", "urgent", HIGH))
    come(admission, *(of("light", f"l{number}") for number in range(3)), of("double", "d0"))
    seen = {name: admission.status(name, 0.0) for name in ("urgent", "h0", "h19", "l0", "l2", "d0")}
    positions = {name: status and status.position for name, status in seen.items()}
    # Weights are 1, 1 and 2: of the others as many pass as their weights give, and no more than there are.
    assert positions == {"urgent": 1, "h0": 5, "h19": 25, "l0": 5, "l2": 13, "d0": 3}
    assert admission.status("running", 0.0) is None
    assert admission.status("unknown", 0.0) is None


def test_expected_start_is_measured_or_unknown() -> None:
    admission = full(100, NORMAL)
    come(admission, of("p", "p0"), of("p", "p1"), of("p", "p2"))
    status = admission.status("p2", 1.0)
    assert status is not None
    assert (status.position, status.expected_start_s) == (3, None)
    admission.on_done("running", 4.0)
    status = admission.status("p2", 4.0)
    assert status is not None
    assert status.position == 2
    assert status.expected_start_s == pytest.approx(8.0, rel=0.1)
    admission.on_replica_gone("a", 5.0)
    status = admission.status("p2", 10.0)
    assert status is not None
    assert status.expected_start_s == DEFAULT_REMAINING_S


def test_leaving_from_the_middle_moves_those_behind_up() -> None:
    admission = full(2000)
    come(admission, *(of("p", f"p{number}") for number in range(1500)))
    for number in range(0, 1400, 2):
        admission.on_cancel(f"p{number}", 1.0)
    status = admission.status("p1499", 1.0)
    assert status is not None
    assert status.position == 800


# Who comes and stays is told apart from who is one of many.


def test_a_snapshot_names_the_busiest_tenants_and_sums_the_rest() -> None:
    admission = full(1000)
    for number in range(60):
        come(admission, *(of(f"t{number}", f"{number}.{turn}") for turn in range(1 + number % 3)))
    seen = admission.snapshot(0.0).tenants
    assert len(seen) == 51
    assert sum(one.waiting for one in seen.values()) == 120
    rest = seen["(other)"]
    assert (rest.waiting, rest.slots) == (10, 1)
    assert all(one.waiting + one.slots >= 1 for one in seen.values())
    assert arrive(admission, "still works") == []
