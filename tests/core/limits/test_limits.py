"""What the limits promise, one rule at a time: three routers and the actor in virtual time."""

from __future__ import annotations

import pytest

from serve_app.core.limits import Charged, LimitReason, Limits
from serve_app.core.limits.actor_limits import UNKNOWN_RETRY_S
from serve_app.core.limits.policy import Kind
from serve_app.core.limits.pools import Pool
from serve_app.core.limits.router_limits import Refusal
from serve_app.core.limits.scopes import DAY_S
from serve_app.core.times import LIMIT_WAIT_S
from tests.core.limits.world import SCOPE, World

PER_MINUTE = Limits(requests_per_minute=60)


def decisions(world: World, count: int, limits: Limits, **more: object) -> list[Charged | Refusal]:
    """So many requests at once, spread over the routers, and what becomes of them within a tenth of a second."""
    found: list[Charged | Refusal] = []
    for number in range(count):
        world.ask(f"r{number % world.routers}", limits, done=found.append, **more)  # type: ignore[arg-type]
    world.run(0.1)
    return found


def kinds(found: list[Charged | Refusal]) -> tuple[int, int]:
    """Charged, refused."""
    charged = sum(isinstance(one, Charged) for one in found)
    return charged, len(found) - charged


def test_a_burst_is_charged_and_the_rest_refused_with_moments_one_request_apart() -> None:
    world = World()
    found = decisions(world, 65, PER_MINUTE)
    assert kinds(found) == (60, 5)
    reported = sorted(one.retry_after_s or 0 for one in found if isinstance(one, Refusal))
    assert reported == pytest.approx([1, 2, 3, 4, 5], abs=0.02)
    assert {one.reason for one in found if isinstance(one, Refusal)} == {LimitReason.RATE_LIMIT}
    assert next(one.limit for one in found if isinstance(one, Refusal)) == "60 requests per minute of this key"


def test_a_client_that_comes_back_at_the_announced_moment_is_served() -> None:
    world = World()
    decisions(world, 60, PER_MINUTE)
    found: list[Charged | Refusal] = []

    def come_back(number: int) -> object:
        def decided(reported: Charged | Refusal) -> None:
            assert isinstance(reported, Refusal)
            again = lambda: world.ask(  # noqa: E731
                f"r{(number + 1) % 3}", PER_MINUTE, done=found.append, fingerprint=b"%d" % number, is_repeat=True
            )
            world.after(reported.retry_after_s or 0, again)

        return decided

    for number in range(30):
        world.ask(f"r{number % 3}", PER_MINUTE, done=come_back(number), fingerprint=b"%d" % number)  # type: ignore[arg-type]
    for second in range(30):  # others come all the time
        world.after(second, lambda: world.ask("r0", PER_MINUTE, fingerprint=b"other"))
    world.run(40)
    assert kinds(found) == (30, 0)
    assert world.excess(SCOPE, PER_MINUTE, Kind.REQUESTS) < 0.01


def test_identical_requests_each_have_a_moment_of_their_own() -> None:
    world = World()
    decisions(world, 60, PER_MINUTE)
    found = decisions(world, 5, PER_MINUTE, fingerprint=b"the same")
    assert sorted(one.retry_after_s or 0 for one in found if isinstance(one, Refusal)) == pytest.approx(
        [0.9, 1.9, 2.9, 3.9, 4.9], abs=0.1
    )


def test_a_place_nobody_comes_back_for_is_taken_by_who_is_there() -> None:
    world = World()
    decisions(world, 60, PER_MINUTE)
    decisions(world, 20, PER_MINUTE, is_repeat=False)  # they never come back
    before = len(world.charged)
    for second in range(60):
        world.after(second, lambda: world.ask("r1", PER_MINUTE, is_repeat=False))
    world.run(60)
    assert len(world.charged) - before >= 57  # all but the grace of the first


def test_a_request_that_waits_aside_is_served_in_order_and_nothing_is_left_unused() -> None:
    world = World()
    found = decisions(world, 90, PER_MINUTE, may_wait=True)
    assert kinds(found) == (60, 0)
    world.run(35)
    waits = [one.waited_s for one in found if isinstance(one, Charged)][60:]
    assert waits == pytest.approx(list(range(1, 31)), abs=0.05)


def test_a_client_that_leaves_the_wait_gives_its_place_to_the_next() -> None:
    world = World()
    decisions(world, 60, PER_MINUTE)
    first = world.ask("r0", PER_MINUTE, may_wait=True)
    found: list[Charged | Refusal] = []
    world.run(0.1)
    world.ask("r1", PER_MINUTE, done=found.append, may_wait=True)
    world.run(0.1)
    world.leave(first)
    world.run(1.0)
    assert kinds(found) == (1, 0)


def test_requests_at_once_never_exceed_the_limit_and_a_free_slot_goes_to_who_waits() -> None:
    limits = Limits(max_concurrent=8)
    world = World()
    served: list[str] = []

    def come(number: int) -> None:
        def decided(reported: Charged | Refusal) -> None:
            if isinstance(reported, Charged):
                served.append(reported.request_id)
                world.after(1.0, lambda: world.end(reported.request_id, 1))
            else:
                assert reported.reason is LimitReason.CONCURRENCY
                world.after(reported.retry_after_s or 0.0, lambda: come(number))

        world.ask(f"r{number % 3}", limits, done=decided, fingerprint=b"%d" % number, is_repeat=None)

    for number in range(50):
        come(number)
    world.run(9)
    assert len(served) == 50
    assert world.most[SCOPE] == 8
    assert world.is_at_rest()


def test_a_request_larger_than_its_bucket_is_refused_at_once_and_for_good() -> None:
    world = World()
    found = decisions(world, 1, Limits(tokens_per_minute=100), tokens=101)
    assert isinstance(found[0], Refusal)
    assert (found[0].retry_after_s, found[0].limit) == (None, "100 tokens per minute of this key")


def test_a_refund_and_an_estimate_too_high_serve_the_next_at_once() -> None:
    limits = Limits(tokens_per_minute=100)
    world = World()
    ids = [world.ask("r0", limits, tokens=50), world.ask("r1", limits, tokens=50)]
    world.run(0.1)
    assert kinds(decisions(world, 1, limits, tokens=40, is_repeat=False)) == (0, 1)
    world.end(ids[0], None)  # it failed
    world.run(0.1)
    assert kinds(decisions(world, 1, limits, tokens=40, is_repeat=False)) == (1, 0)


def test_an_overdraft_is_paid_before_the_next_request() -> None:
    limits = Limits(tokens_per_minute=60)
    world = World()
    first = world.ask("r0", limits, tokens=60)
    world.run(0.1)
    world.end(first, 90)
    (refused,) = decisions(world, 1, limits, tokens=10)
    assert isinstance(refused, Refusal)
    assert refused.retry_after_s == pytest.approx(40, abs=0.5)


def test_a_quota_is_refused_until_midnight_and_begins_anew_then() -> None:
    limits = Limits(requests_per_day=3)
    world = World()
    found = decisions(world, 4, limits)
    assert kinds(found) == (3, 1)
    (refused,) = [one for one in found if isinstance(one, Refusal)]
    assert refused.reason is LimitReason.ALLOWANCE
    world.run((refused.retry_after_s or 0) + 1)
    world.actor.set_clock(1_700_000_000.0 + world.now, world.now)
    assert kinds(decisions(world, 4, limits)) == (3, 1)


def used(requests_of_day: float) -> tuple[float, ...]:
    return tuple(requests_of_day if kind is Kind.REQUESTS_OF_DAY else 0.0 for kind in Kind)


def test_nothing_is_charged_to_a_quota_of_which_the_use_is_unknown() -> None:
    limits = Limits(requests_per_day=3)
    world = World()
    world.actor.asks_store = True
    found: list[Charged | Refusal] = []
    world.ask("r0", limits, done=found.append)
    world.run(LIMIT_WAIT_S - 0.1)
    assert world.actor.take_unknown() == [SCOPE]
    assert found == []
    world.run(0.2)
    (refused,) = found
    assert isinstance(refused, Refusal)
    assert (refused.limit, refused.retry_after_s) == ("", UNKNOWN_RETRY_S)
    world.ask("r1", limits, done=found.append)
    world.run(0.1)
    world.actor.on_used(SCOPE, used(3), world.actor.calendar.period, world.now)
    assert kinds(decisions(world, 2, limits)) == (0, 2)
    assert isinstance(found[-1], Refusal)
    assert found[-1].reason is LimitReason.ALLOWANCE
    assert found[-1].limit


def test_a_quota_that_a_key_gets_during_the_day_counts_what_was_used_of_it_before_and_of_no_other_twice() -> None:
    world = World()
    world.actor.asks_store = True
    world.ask("r0", Limits(requests_per_day=10))
    world.run(0.1)
    assert world.actor.take_unknown() == [SCOPE]
    world.actor.on_used(SCOPE, used(3), world.actor.calendar.period, world.now)
    world.run(0.1)
    both = Limits(requests_per_day=10, tokens_per_day=100)
    found: list[object] = []
    world.ask("r1", both, tokens=40, done=found.append)
    world.run(0.1)
    assert (found, world.actor.take_unknown()) == ([], [SCOPE])
    amounts = {Kind.REQUESTS_OF_DAY: 4.0, Kind.TOKENS_OF_DAY: 70.0}
    world.actor.on_used(SCOPE, tuple(amounts.get(kind, 0.0) for kind in Kind), world.actor.calendar.period, world.now)
    assert kinds(decisions(world, 10, both, tokens=2)) == (6, 4)  # 3 were used, and one is charged
    assert [type(one) for one in found] == [Refusal]


def test_another_store_is_asked_for_all_that_is_unknown() -> None:
    world = World()
    world.actor.asks_store = True
    for name in ("key:a", "key:b"):
        world.ask("r0", {name: Limits(requests_per_day=3)})
    world.run(0.1)
    assert sorted(world.actor.take_unknown()) == ["key:a", "key:b"]
    world.actor.on_used("key:a", used(0), world.actor.calendar.period, world.now)
    world.actor.ask_again()
    assert world.actor.take_unknown() == ["key:b"]


@pytest.mark.parametrize("knows_use", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("tokens", [10, None, 1500], ids=["settled", "failed", "more"])
def test_a_request_over_midnight_is_settled_in_the_day_that_it_was_charged_to(
    tokens: int | None, knows_use: bool
) -> None:
    limits = Limits(tokens_per_day=1000)
    world = World()
    late = world.ask("r0", limits, tokens=900)
    world.run(0.1)
    world.actor.set_clock(1_700_000_000.0 + world.now + DAY_S, world.now)
    today = world.ask("r0" if knows_use else "r1", limits, tokens=800)
    world.run(0.1)
    assert len(world.charged) == 2
    world.end(late, tokens)
    world.run(5)
    assert kinds(decisions(world, 1, limits, tokens=201)) == (0, 1)
    assert kinds(decisions(world, 1, limits, tokens=200)) == (1, 0)
    world.end(today, 700)
    world.run(5)
    assert kinds(decisions(world, 1, limits, tokens=100)) == (1, 0)


def test_an_answer_about_yesterday_charges_nothing_to_today() -> None:
    limits = Limits(requests_per_day=3, budget_per_month=1.0)
    world = World()
    world.actor.asks_store = True
    world.ask("r0", limits)
    world.run(0.1)
    asked = world.actor.calendar.period
    world.actor.set_clock(1_700_000_000.0 + world.now + DAY_S, world.now)
    budget = {Kind.REQUESTS_OF_DAY: 3.0, Kind.COST_OF_MONTH: 400_000.0}
    world.actor.on_used(SCOPE, tuple(budget.get(kind, 0.0) for kind in Kind), asked, world.now)
    assert kinds(decisions(world, 3, limits)) == (2, 1)  # the first one has taken one
    assert world.actor.scopes[SCOPE].pools[Kind.COST_OF_MONTH].balance == pytest.approx(600_000)


def test_a_clock_that_is_set_back_gives_no_second_day() -> None:
    limits = Limits(requests_per_day=3)
    world = World()
    decisions(world, 3, limits)
    for wall_s in (1_700_000_000.0 - 86_400, 1_700_000_000.0):
        world.actor.set_clock(wall_s, world.now)
    assert kinds(decisions(world, 1, limits)) == (0, 1)


@pytest.mark.parametrize("wrong_days", [1, 2, 40, 4000])
def test_one_reading_of_a_clock_in_the_future_ends_no_renewal(wrong_days: int) -> None:
    limits = Limits(requests_per_day=3)
    world = World(heartbeat_s=60.0)  # those of four days are a million by the second
    wall_s = 1_700_000_000.0
    for days in (wrong_days, 0):
        world.actor.set_clock(wall_s + days * DAY_S, world.now)
    for day in (1, 2, 3, 4):
        world.run(DAY_S)
        world.actor.set_clock(wall_s + day * DAY_S, world.now)
        if day > 1:  # the first one has begun already, at the wrong reading
            assert kinds(decisions(world, 4, limits)) == (3, 1)


def test_far_from_a_limit_hardly_any_message_is_sent() -> None:
    limits = Limits(requests_per_minute=6000, tokens_per_minute=600_000, max_concurrent=30)
    world = World()
    before = world.to_actor
    for number in range(3000):
        ask = lambda number=number: world.ask(  # noqa: E731
            f"r{number % 3}", limits, 50, lambda reported: world.after(0.1, lambda: world.end(reported.request_id, 40))
        )
        world.after(number * 0.1, ask)
    world.run(302)
    assert len(world.charged) == 3000
    heartbeats = 3 * 302
    assert world.to_actor - before < heartbeats + 0.05 * 3000


def test_limits_of_key_tenant_and_model_all_hold() -> None:
    scopes = {
        "key:a": Limits(requests_per_minute=600),
        "tenant:t": Limits(requests_per_minute=60),
        "model:t/m": Limits(max_concurrent=5),
    }
    world = World()
    found: list[Charged | Refusal] = []
    for number in range(70):
        world.ask(f"r{number % 3}", scopes, done=found.append, is_repeat=False)
    world.run(0.1)
    assert kinds(found) == (5, 65)
    assert {one.reason for one in found if isinstance(one, Refusal)} >= {LimitReason.CONCURRENCY}


def test_a_lost_router_s_slots_come_back_and_its_credit_counts_as_used() -> None:
    limits = Limits(requests_per_minute=600, max_concurrent=6)
    world = World()
    assert kinds(decisions(world, 6, limits)) == (6, 0)
    world.kill_router("r0")
    world.run(1)
    assert kinds(decisions(World(), 6, limits)) == (6, 0)
    world.run(5)
    found: list[Charged | Refusal] = []
    for _ in range(3):
        world.ask("r1", limits, done=found.append)
    world.run(0.2)
    assert kinds(found) == (2, 1)


def test_after_a_restart_of_the_actor_the_bucket_is_what_it_was() -> None:
    world = World()
    decisions(world, 50, PER_MINUTE)
    world.start_actor()
    world.run(0.5)
    assert kinds(decisions(world, 20, PER_MINUTE))[0] == pytest.approx(10, abs=1)
    assert world.excess(SCOPE, PER_MINUTE, Kind.REQUESTS) < 0.01


def test_an_announced_moment_survives_a_restart_of_the_actor() -> None:
    world = World()
    decisions(world, 60, PER_MINUTE)
    (reported,) = decisions(world, 1, PER_MINUTE, fingerprint=b"mine")
    assert isinstance(reported, Refusal)
    world.start_actor()
    world.run((reported.retry_after_s or 0) - 0.1)
    decisions(world, 3, PER_MINUTE, fingerprint=b"others", is_repeat=False)
    assert kinds(decisions(world, 1, PER_MINUTE, fingerprint=b"mine", is_repeat=True)) == (1, 0)


def test_a_changed_limit_keeps_what_was_used() -> None:
    world = World()
    decisions(world, 60, PER_MINUTE)
    assert kinds(decisions(world, 70, Limits(requests_per_minute=120)))[0] == pytest.approx(60, abs=1)
    assert kinds(decisions(world, 1, Limits(requests_per_minute=30))) == (0, 1)


def test_idle_scopes_are_forgotten_on_both_sides() -> None:
    world = World()
    for number in range(100):
        request_id = world.ask("r0", {f"key:{number}": PER_MINUTE})
        world.after(0.1, lambda request_id=request_id: world.end(request_id, 1))  # type: ignore[misc]
    world.run(200)
    world.actor.set_clock(1_700_000_000.0 + world.now, world.now)
    assert not world.actor.scopes
    assert not world.cores["r0"].scopes


def test_a_place_given_up_before_its_bucket_has_refilled_serves_nobody() -> None:
    pool = Pool(Kind.REQUESTS, PER_MINUTE, 0.0, 0.0)
    for number in ("a", "b"):  # told before a restart, from a bucket that had more
        pool.reserve(number, 1.0, 0.0)
    pool.release("a", 1.0, is_used=False)
    assert not pool.has(1.0)
    pool.refill(1.0)
    assert pool.has(1.0)
