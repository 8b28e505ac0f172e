"""A grant names what its request waited for."""

from __future__ import annotations

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Admission, Grant, QueuePolicy
from serve_app.core.queue.events import Action, WaitReason
from tests.core.queue.events import HIGH, LOW, NORMAL, admission, arrival, arrive


def reasons(actions: list[Action]) -> dict[str, WaitReason | None]:
    return {action.request_id: action.waited_for for action in actions if isinstance(action, Grant)}


def with_tokens(**replicas: tuple[int, int]) -> Admission:
    """Replicas by slots and KV tokens."""
    made = Admission(QueuePolicy(100, 60.0))
    for name, (slots, tokens) in replicas.items():
        set_replica(made, name, slots, 0.0, kv_tokens=tokens)
    return made


def test_a_request_that_runs_at_once_waited_for_nothing() -> None:
    assert reasons(arrive(admission(a=1), "p")) == {"p": None}


def test_the_first_waits_for_slots_and_those_behind_it_for_their_turn() -> None:
    queue = admission(a=1)
    arrive(queue, "running", "p", "q")
    assert reasons(queue.on_done("running", 1.0)) == {"p": WaitReason.SLOTS}
    assert reasons(queue.on_done("p", 2.0)) == {"q": WaitReason.TURN}


def test_a_class_waits_for_its_turn_behind_a_higher_one() -> None:
    queue = admission(a=1)
    arrive(queue, "running", "high", cls=HIGH)
    arrive(queue, "low", cls=LOW)
    queue.on_done("running", 1.0)
    assert reasons(queue.on_done("high", 2.0)) == {"low": WaitReason.TURN}


def test_a_turn_that_came_and_found_too_little_is_explained_by_what_was_too_little() -> None:
    queue = admission(a=2)
    arrive(queue, "r1", "r2", "p")
    arrive(queue, "wide", slots=2)
    assert reasons(queue.on_done("r1", 1.0)) == {"p": WaitReason.SLOTS}
    assert reasons(queue.on_done("r2", 2.0)) == {}  # one slot is free, and it needs two
    assert reasons(queue.on_done("p", 3.0)) == {"wide": WaitReason.SLOTS}


def test_free_slots_without_enough_kv_tokens_are_a_wait_for_tokens() -> None:
    queue = with_tokens(a=(4, 100))
    queue.on_arrive(arrival("running", cost_tokens=80), 0.0)
    queue.on_arrive(arrival("p", cost_tokens=50), 0.0)
    assert reasons(queue.on_done("running", 1.0)) == {"p": WaitReason.KV_TOKENS}


def test_without_any_free_token_the_tokens_are_the_reason_and_not_the_slots() -> None:
    queue = with_tokens(a=(4, 100))
    queue.on_arrive(arrival("running", cost_tokens=100), 0.0)
    queue.on_arrive(arrival("p", cost_tokens=50), 0.0)
    assert reasons(queue.on_done("running", 30.0)) == {"p": WaitReason.KV_TOKENS}


def test_the_last_cause_counts() -> None:
    queue = with_tokens(a=(2, 100))
    queue.on_arrive(arrival("r1", cost_tokens=60), 0.0)
    queue.on_arrive(arrival("r2", cost_tokens=10), 0.0)
    queue.on_arrive(arrival("p", cost_tokens=80), 0.0)  # for a slot
    queue.on_done("r2", 1.0)  # now a slot is free, and 40 tokens are not enough
    assert reasons(queue.on_done("r1", 50.0)) == {"p": WaitReason.KV_TOKENS}


def test_a_request_bound_to_a_busy_replica_waits_for_its_placement() -> None:
    queue = with_tokens(a=(1, 100), b=(1, 100))
    queue.on_arrive(arrival("running", only_replica="a"), 0.0)
    queue.on_arrive(arrival("p", only_replica="a"), 0.0)
    assert reasons(queue.on_done("running", 1.0)) == {"p": WaitReason.PLACEMENT}


def test_a_replica_in_kv_debt_is_the_reason_while_it_has_room() -> None:
    queue = with_tokens(a=(4, 100))
    queue.on_kv_debt("a", NORMAL, 0.0)
    queue.on_arrive(arrival("p"), 0.0)
    assert reasons(queue.on_kv_debt("a", None, 1.0)) == {"p": WaitReason.KV_DEBT}


def test_a_replica_held_back_for_a_larger_request_is_the_reason() -> None:
    queue = with_tokens(a=(2, 100), b=(2, 10))
    queue.on_arrive(arrival("running", cost_tokens=20), 0.0)
    queue.on_arrive(arrival("wide", HIGH, slots=2, cost_tokens=60), 0.0)
    queue.on_arrive(arrival("p", cost_tokens=50), 0.0)  # there is room for it on `a`, which is held back for `wide`
    assert reasons(queue.on_cancel("wide", 1.0)) == {"p": WaitReason.HELD_BACK}


def test_guard_slots_are_the_reason_of_the_classes_that_may_not_take_them() -> None:
    queue = Admission(QueuePolicy(1000, 3600.0, guard_slots_share=0.5))
    set_replica(queue, "a", 4, 0.0)
    for number in range(200):  # the guarded classes use all that comes free
        queue.on_arrive(arrival(f"h{number}", HIGH), 0.1 * number)
        queue.on_done(f"h{number}", 0.1 * number + 0.05)
    arrive(queue, "r1", "r2", "r3", cls=HIGH, now=20.0)
    assert queue.scheduler.guard_slots(LOW) >= 1
    queue.on_arrive(arrival("low", LOW), 20.0)
    granted: dict[str, WaitReason | None] = {}
    for name in ("r1", "r2", "r3"):
        granted |= reasons(queue.on_done(name, 20.1))
    assert granted == {"low": WaitReason.GUARD_SLOTS}


def test_before_the_first_replica_it_is_the_reason() -> None:
    queue = Admission(QueuePolicy(100, 60.0))
    arrive(queue, "p", "q")
    assert reasons(set_replica(queue, "a", 2, 5.0)) == {"p": WaitReason.NO_REPLICA, "q": WaitReason.NO_REPLICA}


def test_what_waits_on_after_the_first_replica_waits_for_something_else() -> None:
    queue = Admission(QueuePolicy(100, 600.0))
    arrive(queue, "p", "q")
    set_replica(queue, "a", 1, 5.0)
    assert reasons(queue.on_done("p", 200.0)) == {"q": WaitReason.TURN}


def reasons_now(queue: Admission) -> dict[str, WaitReason]:
    return {waiting.arrival.request_id: reason for waiting, reason in queue.wait_reasons()}


def test_the_first_that_waits_lacks_a_slot_at_once_and_those_behind_it_wait_for_their_turn() -> None:
    queue = admission(a=1)
    arrive(queue, "running", "p", "q", "r")
    assert reasons_now(queue) == {"p": WaitReason.SLOTS, "q": WaitReason.TURN, "r": WaitReason.TURN}
    queue.on_done("running", 1.0)
    assert reasons_now(queue) == {"q": WaitReason.SLOTS, "r": WaitReason.TURN}


def test_whoever_comes_to_the_front_of_the_queue_lacks_the_slot_and_nobody_else() -> None:
    queue = admission(a=1)
    arrive(queue, "running", "low", cls=LOW)
    assert reasons_now(queue) == {"low": WaitReason.SLOTS}
    arrive(queue, "high", cls=HIGH)
    assert reasons_now(queue) == {"low": WaitReason.TURN, "high": WaitReason.SLOTS}
    queue.on_cancel("high", 1.0)
    assert reasons_now(queue) == {"low": WaitReason.SLOTS}


def test_the_first_of_each_class_says_what_it_lacks_while_something_is_free() -> None:
    queue = with_tokens(a=(4, 100), b=(4, 100))
    for replica in "ab":
        queue.on_arrive(arrival(f"running on {replica}", only_replica=replica, cost_tokens=60), 0.0)
    queue.on_arrive(arrival("wide", HIGH, cost_tokens=80), 0.0)
    queue.on_arrive(arrival("second", HIGH, cost_tokens=80), 0.0)
    queue.on_arrive(arrival("bound", NORMAL, only_replica="a", cost_tokens=50), 0.0)
    assert reasons_now(queue) == {
        "wide": WaitReason.KV_TOKENS,
        "second": WaitReason.TURN,
        "bound": WaitReason.KV_TOKENS,
    }


def test_a_lower_class_that_was_first_waits_for_its_turn_once_a_higher_one_holds_all_that_is_free() -> None:
    queue = with_tokens(a=(4, 100))
    queue.on_arrive(arrival("running", cost_tokens=60), 0.0)
    queue.on_arrive(arrival("low", LOW, cost_tokens=50), 0.0)
    assert reasons_now(queue) == {"low": WaitReason.KV_TOKENS}
    queue.on_arrive(arrival("high", HIGH, cost_tokens=60), 0.0)
    assert reasons_now(queue) == {"low": WaitReason.TURN, "high": WaitReason.KV_TOKENS}


def test_without_a_replica_all_wait_for_one_whether_it_is_the_first_or_was_lost() -> None:
    queue = admission()
    arrive(queue, "p", "q")
    assert reasons_now(queue) == dict.fromkeys("pq", WaitReason.NO_REPLICA)
    set_replica(queue, "a", 1, 1.0)
    assert reasons_now(queue) == {"q": WaitReason.SLOTS}
    arrive(queue, "r", now=2.0)
    queue.on_replica_gone("a", 3.0)
    assert reasons_now(queue) == dict.fromkeys("qr", WaitReason.NO_REPLICA)


def test_a_request_that_no_replica_could_run_now_says_what_it_lacks_beside_the_first_that_one_could() -> None:
    queue = with_tokens(a=(1, 100))
    queue.on_arrive(arrival("running"), 0.0)
    queue.on_arrive(arrival("elsewhere", only_replica="b"), 0.0)
    queue.on_arrive(arrival("p"), 0.0)
    assert reasons_now(queue) == {"elsewhere": WaitReason.SLOTS, "p": WaitReason.SLOTS}
