"""The metrics name the tenants of most use, few enough for ever, and no count ever moves."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.usage.named_tenants import HALF_LIFE_S, MAX_NAMES, OTHER, SWAP_FACTOR, NamedTenants

TENANTS = [f"t{number}" for number in range(8)]
SEEDS = range(20)
uses = st.tuples(st.sampled_from(TENANTS), st.integers(1, 1000))
choices = st.floats(0.0, 2 * HALF_LIFE_S)
events = st.lists(st.one_of(uses, choices), max_size=200)


class Router:
    """Counts requests under the labels of tenants, and the true use of each."""

    def __init__(self, limit: int, known: int) -> None:
        self.names = NamedTenants(limit, known)
        self.counts: Counter[str] = Counter()
        self.uses: dict[str, float] = {}
        self.now = 0.0

    def request(self, tenant: str, tokens: int) -> None:
        self.names.add(tenant, tokens)
        self.counts[self.names.label(tenant)] += 1
        self.uses[tenant] = self.uses.get(tenant, 0.0) + tokens

    def choose(self, passed_s: float) -> None:
        self.now += passed_s
        self.uses = {tenant: use * 0.5 ** (passed_s / HALF_LIFE_S) for tenant, use in self.uses.items()}
        self.names.choose(self.now)

    def run(self, story: list[tuple[str, int] | float]) -> None:
        self.names.choose(0.0)
        for event in story:
            if isinstance(event, tuple):
                self.request(*event)
            else:
                self.choose(event)


@settings(deadline=None)
@given(events, st.integers(0, 5), st.integers(0, 8))
def test_few_tenants_are_named_for_ever_and_every_request_is_counted(
    story: list[tuple[str, int] | float], limit: int, known: int
) -> None:
    router = Router(limit, known)
    router.run(story)
    assert len(router.names.named) <= limit
    assert set(router.counts) <= router.names.ever_named | {OTHER}
    assert len(router.names.ever_named) <= MAX_NAMES * limit
    assert router.counts.total() == sum(isinstance(event, tuple) for event in story)


@settings(deadline=None)
@given(events, st.integers(1, 5), st.integers(0, 8))
def test_after_a_choice_none_without_a_name_uses_much_more_than_one_with_a_name(
    story: list[tuple[str, int] | float], limit: int, known: int
) -> None:
    router = Router(limit, known)
    router.run(story)
    router.choose(0.0)
    names = router.names
    may_have_one = {
        tenant for tenant in router.uses if tenant in names.ever_named or len(names.ever_named) < MAX_NAMES * limit
    }
    unnamed = [router.uses[tenant] for tenant in may_have_one - names.named if router.uses[tenant] > 0.01]
    if unnamed:
        assert len(names.named) == limit
        lightest = min(router.uses.get(tenant, 0.0) for tenant in names.named)
        assert max(unnamed) <= SWAP_FACTOR * lightest * (1 + 1e-9) + 0.01


@given(st.lists(uses, max_size=50))
def test_as_many_tenants_as_names_are_named_at_once(story: list[tuple[str, int]]) -> None:
    router = Router(len(TENANTS), len(TENANTS))
    for tenant, tokens in story:
        router.request(tenant, tokens)
    assert router.counts[OTHER] == 0
    assert router.counts == Counter(tenant for tenant, _ in story)


def test_of_many_tenants_none_is_named_before_its_use_is_known() -> None:
    router = Router(2, known=3)
    for tenant, tokens in (("light", 1), ("heavy", 50), ("light", 1), ("second", 20)):
        router.request(tenant, tokens)
    assert router.counts == {OTHER: 4}
    router.choose(1.0)
    for tenant in ("light", "heavy", "second"):
        router.request(tenant, 1)
    assert router.counts == {OTHER: 5, "heavy": 1, "second": 1}


def test_a_tenant_that_comes_back_is_counted_where_it_was() -> None:
    router = Router(1, known=2)
    router.request("early", 100)
    router.choose(0.0)
    router.request("early", 1)
    router.request("late", 300)
    router.choose(0.0)
    router.request("late", 1)
    router.request("early", 5000)
    router.choose(0.0)
    router.request("early", 1)
    assert router.names.named == {"early"}
    assert router.counts == {OTHER: 3, "early": 2, "late": 1}


def test_tenants_of_equal_use_do_not_take_names_from_each_other() -> None:
    for seed in SEEDS:
        router = Router(4, known=8)
        rng = random.Random(seed)
        for minute in range(100):
            for _ in range(30):
                router.request(rng.choice(TENANTS), 100)
            router.choose(60.0)
            if minute == 10:
                settled = set(router.names.named)
        assert router.names.named == settled, seed


def test_of_ten_thousand_tenants_the_heavy_ones_are_named_and_the_names_stay_few() -> None:
    """Whose use falls as 1 / rank."""
    rng = random.Random(7)
    tenants = [f"t{rank}" for rank in range(1, 10_001)]
    weights = [1 / rank for rank in range(1, 10_001)]
    router = Router(20, known=len(tenants))
    for _ in range(30):
        for tenant in rng.choices(tenants, weights, k=3000):
            router.request(tenant, 100)
        router.choose(60.0)
    assert set(tenants[:10]) <= router.names.named
    assert len(router.names.ever_named) <= 22


def test_a_smaller_limit_keeps_the_heaviest() -> None:
    router = Router(3, known=3)
    for tenant, tokens in (("a", 1), ("b", 30), ("c", 20)):
        router.request(tenant, tokens)
    router.names.limit = 1
    router.choose(0.0)
    assert router.names.named == {"b"}
    assert router.names.ever_named == {"a", "b", "c"}
