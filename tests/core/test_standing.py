"""Which routers count for what a line may grant: one that has lost its way takes the engines from nobody."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.exchange.standing import ASIDE_AFTER_S, Standing

LATER = ASIDE_AFTER_S
ROUTERS = ("a", "b", "c")


def judged(reached: dict[str, dict[str, bool]], *routers: str) -> frozenset[str]:
    """Who is left aside once it has been so for long enough."""
    standing = Standing()
    standing.look(reached, routers or ROUTERS, 0.0)
    assert not standing.aside, "nobody is left aside at once"
    standing.look(reached, routers or ROUTERS, LATER)
    return standing.aside


def of(**reached: str) -> dict[str, dict[str, bool]]:
    """Engines, each with the routers that reach it by their letters."""
    return {engine: {router: router in who for router in ROUTERS} for engine, who in reached.items()}


def test_a_router_that_reaches_nothing_is_left_aside_after_a_while() -> None:
    assert judged(of(e="ab", f="ab")) == {"c"}


def test_a_router_that_reaches_few_of_many_is_left_aside() -> None:
    assert judged(of(e="abc", f="ab", g="ab")) == {"c"}


def test_an_engine_that_one_router_has_ejected_is_out_and_its_router_counts() -> None:
    assert judged(of(e="abc", f="ab")) == frozenset()


def test_routers_that_have_ejected_different_engines_leave_the_one_that_most_reach() -> None:
    assert judged(of(e="ab", f="bc", g="ac")) == {"c"}
    assert judged(of(e="a", f="b"), "a", "b") == {"b"}


def test_while_nobody_reaches_anything_nobody_is_left_aside() -> None:
    assert judged(of(e="", f="")) == frozenset()
    assert judged({}) == frozenset()


def test_a_router_counts_again_as_soon_as_it_reaches_enough() -> None:
    standing = Standing()
    standing.look(of(e="ab"), ROUTERS, 0.0)
    assert standing.next_due() == LATER
    assert standing.look(of(e="ab"), ROUTERS, LATER)
    assert standing.next_due() == math.inf
    assert standing.look(of(e="abc"), ROUTERS, LATER + 0.1)
    assert standing.aside == frozenset()
    assert not standing.look(of(e="ab"), ROUTERS, LATER + 0.2)
    assert standing.next_due() == 2 * LATER + 0.2


def test_a_router_that_is_late_once_is_not_left_aside() -> None:
    standing = Standing()
    standing.look(of(e="ab"), ROUTERS, 0.0)
    standing.look(of(e="abc"), ROUTERS, 1.0)
    standing.look(of(e="abc"), ROUTERS, 100.0)
    assert standing.aside == frozenset()


@given(st.dictionaries(st.sampled_from("efgh"), st.dictionaries(st.sampled_from(ROUTERS), st.booleans()), max_size=4))
def test_whenever_somebody_reaches_something_there_is_an_engine_for_those_who_count(
    reached: dict[str, dict[str, bool]],
) -> None:
    aside = judged(reached)
    count = [router for router in ROUTERS if router not in aside]
    assert count
    if any(any(by.values()) for by in reached.values()):
        assert any(all(by.get(router) for router in count) for by in reached.values())
