"""A router's credit by engine: which can be granted on, and that nothing of a model outlives its engines."""

from __future__ import annotations

from serve_app.core.shared_queue.router_credit import RouterCredit


def test_engines_without_credit_leave_one_after_the_other_and_leave_nothing() -> None:
    """As when a model is closed while others have all of it: the first to leave takes the model's index along."""
    accounts = RouterCredit()
    for engine in ("a", "b", "c"):
        accounts.set_reachability("m", engine, usable=True)
    for engine in ("a", "b", "c"):
        accounts.drop_engine(engine)
        assert accounts.choose("m", 1, 1, None) is None
    assert not accounts.by_engine
    assert not accounts.engines_with_credit


def test_an_engine_that_got_credit_after_another_left_is_found() -> None:
    accounts = RouterCredit()
    accounts.set_reachability("m", "a", usable=True)
    accounts.set_reachability("m", "b", usable=True)
    accounts.drop_engine("a")
    accounts.add("b", 2, 100)
    assert accounts.choose("m", 2, 100, None) == "b"
    accounts.drop_engine("b")
    assert accounts.choose("m", 1, 1, None) is None


def test_what_has_begun_is_granted_on_credit_where_the_fingerprint_is_known_to_be_the_same() -> None:
    accounts = RouterCredit()
    for engine, slots in (("a", 4), ("b", 2), ("c", 3)):
        accounts.set_reachability("m", engine, usable=True)
        accounts.add(engine, slots, 100)
    assert accounts.choose("m", 1, 1, None, "x") is None, "none has told its fingerprint"
    assert not accounts.may_run("m", "x")
    accounts.by_engine["a"].fingerprint = "y"
    accounts.by_engine["b"].fingerprint = "x"
    assert accounts.choose("m", 1, 1, None, "x") == "b"
    assert accounts.choose("m", 1, 1, "a", "x") == "b", "an affinity does not change that"
    assert accounts.choose("m", 3, 1, None, "x") is None
    assert accounts.choose("m", 1, 1, None) == "a"
    assert accounts.may_run("m", "x")
    assert accounts.may_run("m", None)
    assert not accounts.may_run("m", "z")


def test_what_some_engines_do_not_know_is_granted_on_credit_at_the_others() -> None:
    accounts = RouterCredit()
    for engine, slots in (("a", 4), ("b", 2)):
        accounts.set_reachability("m", engine, usable=True)
        accounts.add(engine, slots, 100)
    ignorant = frozenset(("a",))
    assert accounts.choose("m", 1, 1, None, None, ignorant) == "b"
    assert accounts.choose("m", 1, 1, "a", None, ignorant) == "b", "an affinity does not change that"
    assert accounts.choose("m", 3, 1, None, None, ignorant) is None
    assert accounts.may_run("m", None, ignorant)
    accounts.drop_engine("b")
    assert not accounts.may_run("m", None, ignorant)
    assert accounts.choose("m", 1, 1, None) == "a"


def test_credit_above_the_target_draws_no_request_to_its_engine() -> None:
    accounts = RouterCredit()
    for engine, slots in (("a", 4), ("b", 2)):
        accounts.set_reachability("m", engine, usable=True)
        accounts.by_engine[engine].target_slots = 2
        accounts.add(engine, slots, 100)
    chosen = []
    for _ in range(4):  # one after the other: each ends before the next one begins
        engine = accounts.choose("m", 1, 1, None)
        assert engine is not None
        accounts.grant(engine, 1, 1)
        accounts.add(engine, 1, 1)
        chosen.append(engine)
    assert sorted(chosen) == ["a", "a", "b", "b"]
