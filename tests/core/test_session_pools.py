"""A session is a pool that routers divide: whatever they do, its requests together never hold more than it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_app.core.memory.budgets import Budgets

from serve_app.core.memory.grants import EngineReport, Rank
from serve_app.core.memory.leases import Device
from serve_app.core.memory.quota import RECOVERING, Key, Quota, RouterReport, Value
from serve_app.core.memory.sessions import RECALL_S, SessionAsk, bytes_of, name_of, own_id, tokens_in
from serve_app.errors import BadRequest, InsufficientMemory, LeaseNotFound, Overloaded, Unavailable
from serve_app.types import RequestClass
from tests.core.exchange_world import MODEL, World

ENGINE = EngineReport("engine", "m", (Rank("node", 0),), 1000, 1000)
POOL_TOKENS, TOKENS = 1000, 100
NAME = name_of("tenant", "agent-7")
ASK = SessionAsk(NAME, "m", TOKENS, 60.0)


class Place:
    """A quota actor's core with one engine, and routers that speak to it without a network between."""

    def __init__(self, *routers: str) -> None:
        self.now = 0.0
        self.stored: dict[Key, Value] = {}
        self.quota = Quota(1, {}, self.now)
        self._devices()
        self.quota.on_engine(ENGINE, self.now)
        self.runs = replace(ENGINE, holds=self.quota.on_engine(ENGINE, self.now).holds, kv_tokens=POOL_TOKENS)
        self.quota.on_engine(self.runs, self.now)
        self.budgets = {name: Budgets() for name in routers}
        self.wants = dict.fromkeys(routers, 0)
        self._seq = 0
        for name in routers:
            self.budgets[name].on_epoch(1)
            self.budgets[name].open(NAME)

    def _devices(self) -> None:
        self.quota.on_devices([Device("node", 0, 1000, 0)], self.now)

    def persist(self) -> None:
        for key, (keep, value) in self.quota.take_changes().items():
            self.stored[key] = value
            if not keep:
                del self.stored[key]

    def crash(self) -> None:
        self.persist()
        self.quota = Quota(self.quota.epoch + 1, dict(self.stored), self.now)
        self._devices()
        self.quota.on_engine(self.runs, self.now)

    def speak(self, name: str) -> list[str]:
        """A router's word and the answer to it; twice after a crash. Returns whom the actor would wake."""
        budgets = self.budgets[name]
        self._seq += 1
        word = RouterReport(name, budgets.epoch, self._seq, (budgets.report(NAME, self.wants[name]),))
        reply, others = self.quota.on_router(word, self.now)
        budgets.on_epoch(reply.epoch)
        if reply.stale:
            return self.speak(name)
        budgets.on_targets(reply.targets, reply.epoch, self.now)
        return others

    @property
    def used(self) -> int:
        return sum(one.used(NAME) for one in self.budgets.values())


def test_a_session_is_given_in_whole_to_the_router_that_needs_it_and_comes_back() -> None:
    place = Place("a", "b")
    place.quota.on_session(ASK, 0.0)
    for name in ("a", "b", "a"):
        place.wants[name] = TOKENS
        place.speak(name)
        assert place.budgets[name].hold("r", NAME, TOKENS, 0.0)
        place.wants[name] = 0
        place.speak(name)
        assert place.budgets[name].release("r") == TOKENS
        place.speak(name)
        place.speak(name)  # under the new target: the ledger has it again
        assert place.quota.ledger.free(NAME) == TOKENS


def test_whoever_waits_for_a_session_is_woken_when_another_router_gives_it_back() -> None:
    place = Place("a", "b")
    place.quota.on_session(ASK, 0.0)
    place.wants["a"] = place.wants["b"] = TOKENS
    place.speak("a")
    place.budgets["a"].hold("r", NAME, TOKENS, 0.0)
    place.wants["a"] = 0
    place.speak("a")
    place.speak("b")
    assert not place.budgets["b"].fits(NAME, TOKENS, 0.0)
    place.budgets["a"].release("r")
    woken = place.speak("a") + place.speak("a")
    assert "b" in woken
    place.speak("b")
    assert place.budgets["b"].hold("r", NAME, TOKENS, 0.0)


def test_a_report_of_use_renews_a_session_and_silence_ends_it() -> None:
    place = Place("a")
    place.quota.on_session(ASK, 0.0)
    for _ in range(120):
        place.now += 1.0
        place.wants["a"] = 10
        place.quota.on_engine(place.runs, place.now)
        place.speak("a")
        place.quota.on_tick(place.now)
    assert place.quota.on_look(NAME, place.now).expires_at == place.now + 60.0
    place.wants["a"] = 0
    for _ in range(62):
        place.now += 1.0
        place.quota.on_engine(place.runs, place.now)
        place.speak("a")  # an idle router's word renews nothing
        place.quota.on_tick(place.now)
    with pytest.raises(LeaseNotFound) as gone:
        place.quota.on_look(NAME, place.now)
    assert (gone.value.code, "tenant" in gone.value.message) == ("session_not_found", False)


def test_nothing_is_reserved_for_a_session_until_all_routers_have_said_what_they_hold() -> None:
    place = Place("a")
    place.budgets["a"].open("engine")
    place.speak("a")
    place.crash()
    with pytest.raises(Unavailable) as early:
        place.quota.on_session(ASK, 0.0)
    assert early.value.code == RECOVERING
    place.speak("a")
    assert place.quota.on_session(ASK, 0.0) is not None


def test_a_session_survives_the_actor_with_its_size_and_its_engine() -> None:
    place = Place("a")
    before = place.quota.on_session(replace(ASK, granted_bytes=77, given="0.1 GB"), 0.0)
    place.crash()
    assert place.quota.on_look(NAME, 0.0) == before


def test_an_engine_takes_no_more_sessions_than_it_has_places_beside_its_line() -> None:
    place = Place()
    asks = [SessionAsk(name_of("t", f"s{n}"), "m", 10, 60.0, per_engine=2) for n in range(3)]
    assert place.quota.on_session(asks[0], 0.0)
    assert place.quota.on_session(asks[1], 0.0)
    with pytest.raises(InsufficientMemory, match="2 sessions are open there, 2 at most"):
        place.quota.on_session(asks[2], 0.0)
    waiting = replace(asks[2], wait_until=10.0)
    assert place.quota.on_session(waiting, 0.0) is None
    place.quota.on_close(asks[0].session_id)
    opened, late = place.quota.on_tick(1.0)
    assert ([one.session_id for one in opened], late) == ([waiting.session_id], [])


def test_a_tenant_has_no_more_sessions_than_it_may_and_keeps_nobody_else_from_his() -> None:
    place = Place()
    for number in range(2):
        place.quota.on_session(SessionAsk(name_of("t", f"s{number}"), "m", 10, 60.0, per_tenant=2), 0.0)
    with pytest.raises(Overloaded) as refused:
        place.quota.on_session(SessionAsk(name_of("t", "s2"), "m", 10, 60.0, per_tenant=2), 0.0)
    assert refused.value.code == "too_many_sessions"
    assert place.quota.on_session(SessionAsk(name_of("other t", "s2"), "m", 10, 60.0, per_tenant=2), 0.0)
    assert place.quota.on_session(SessionAsk(name_of("t", "s1"), "m", 10, 60.0, per_tenant=2), 0.0)  # the same again


def test_one_that_could_never_fit_is_a_bad_request_that_names_no_tenant() -> None:
    with pytest.raises(BadRequest) as refused:
        Place().quota.on_session(SessionAsk(name_of("tenant", "x"), "m", POOL_TOKENS + 1, 60.0), 0.0)
    assert refused.value.code == "session_too_large"
    assert "tenant" not in refused.value.message


@given(
    tenants=st.lists(st.text(min_size=1), min_size=2, max_size=2),
    ids=st.lists(st.from_regex(r"[!-~]+", fullmatch=True), min_size=2, max_size=2),
)
def test_no_two_tenants_ids_are_the_same_session(tenants: list[str], ids: list[str]) -> None:
    first, second = (name_of(tenant, own) for tenant, own in zip(tenants, ids, strict=True))
    assert (first == second) == (tenants[0] == tenants[1] and ids[0] == ids[1])
    assert [own_id(first), own_id(second)] == ids


@given(
    size=st.integers(0, 10**12),
    block=st.integers(1, 64),
    blocks=st.integers(1, 10**6),
    block_bytes=st.integers(1, 10**7),
)
def test_tokens_of_bytes_are_whole_blocks_that_fit(size: int, block: int, blocks: int, block_bytes: int) -> None:
    pool = (blocks * block_bytes, blocks * block, block)
    tokens = tokens_in(size, *pool)
    assert tokens % block == 0
    assert tokens // block == size // block_bytes
    assert bytes_of(tokens, *pool) <= size
    assert tokens_in(bytes_of(tokens, *pool), *pool) == tokens


actions = st.tuples(
    st.sampled_from(["a", "b"]), st.sampled_from(["want", "speak", "end", "crash", "wait"]), st.integers(1, TOKENS)
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(actions, max_size=60))
def test_two_routers_never_hold_more_of_a_session_than_it_has(steps: list[tuple[str, str, int]]) -> None:
    place = Place("a", "b")
    place.quota.on_session(ASK, 0.0)
    running: dict[str, list[str]] = {"a": [], "b": []}
    for number, (name, what, tokens) in enumerate(steps):
        budgets = place.budgets[name]
        if what == "want":
            if budgets.hold(str(number), NAME, tokens, place.now):
                running[name].append(str(number))
                place.wants[name] = 0
            else:
                place.wants[name] = tokens
        elif what == "end" and running[name]:
            budgets.release(running[name].pop())
        elif what == "crash":
            place.crash()
        elif what == "wait":
            place.now += 0.5
            place.quota.on_engine(place.runs, place.now)
            for one in running:
                place.speak(one)
            place.quota.on_tick(place.now)
            place.persist()
        else:
            place.speak(name)
        assert place.used <= TOKENS
        assert 0 <= place.quota.ledger.lease(NAME).held <= TOKENS


def test_credit_that_routers_keep_is_called_back_for_a_session_that_would_not_wait() -> None:
    world = World({"e": (4, 1000)}, 2)
    world.settle(6)
    quota = world.quota
    limit, free = quota.ledger.limit("e"), quota.ledger.free("e")
    assert free < limit, "routers have credit"
    ask = SessionAsk("s", MODEL, limit, 60.0)
    assert quota.on_session(ask, world.now) is None
    world.settle(2)
    quota.on_tick(world.now)
    assert quota.sessions.is_open("s")


def test_a_session_is_refused_after_the_recall_where_the_tokens_are_in_use() -> None:
    world = World({"e": (4, 1000)}, 2)
    world.settle(6)
    world.arrive("r0", RequestClass.LOW, tokens=300)
    world.settle(2)
    quota = world.quota
    ask = SessionAsk("s", MODEL, quota.ledger.limit("e"), 60.0)
    with pytest.raises(InsufficientMemory):
        quota.on_session(ask, world.now)
    world.arrive("r0", RequestClass.LOW, tokens=300)  # of which the actor hears with the next beat
    smaller = replace(ask, tokens=500)
    assert quota.on_session(smaller, world.now) is None
    world.settle(2)
    world.now += RECALL_S
    opened, late = quota.on_tick(world.now)
    assert (opened, [one.session_id for one in late]) == ([], ["s"])
