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
    accounts.change("b", credit=(2, 100))
    assert accounts.choose("m", 2, 100, None) == "b"
    accounts.drop_engine("b")
    assert accounts.choose("m", 1, 1, None) is None
