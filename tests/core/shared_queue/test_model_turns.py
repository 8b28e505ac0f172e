"""After a recovery or when a router reaches more engines, a model's requests do not wait for all of another's."""

from __future__ import annotations

from serve_app.core.pools import Holder
from serve_app.core.queue import Admission, Arrival
from serve_app.core.shared_queue.incarnations import ActorRequest, Incarnation
from serve_app.core.shared_queue.messages import DEFAULT_POLICY
from serve_app.core.shared_queue.model_state import EngineState, ModelState
from serve_app.core.shared_queue.model_turns import ModelTurns
from serve_app.core.shared_queue.placements import Placements
from serve_app.core.shared_queue.postponed import HAND_IN_S, PostponedRequests
from serve_app.core.shared_queue.scope import AT_ONCE
from serve_app.types import RequestClass

MANY = 10 * AT_ONCE


def arrival(ticket: str) -> Arrival:
    return Arrival(ticket, RequestClass.LOW, "t")


def test_models_take_turns_and_each_keeps_its_order() -> None:
    turns = ModelTurns[str]()
    for model, key in ("aa", "ab", "ac", "ba", "ca", "cb"):
        turns.add(model, model + key, model + key)
    turns.add("a", "aa", "aa")  # keeps its place
    assert "c" in turns
    assert [turns.take() for _ in range(7)] == ["aa", "ba", "ca", "ab", "cb", "ac", None]
    assert not turns
    assert "c" not in turns


def test_the_first_event_after_a_recovery_admits_requests_of_every_model() -> None:
    postponed = PostponedRequests()
    for number in range(MANY):
        postponed.add("r0", "big", arrival(f"r0:{number}"), 0.0)
    postponed.add("r1", "small", arrival("r1:0"), 1.0)
    postponed.gather(["big", "small"], 0.0)
    taken = postponed.take(HAND_IN_S)
    assert len(taken) == AT_ONCE
    assert "small" in {one.model for one in taken}
    assert not postponed.gathers("small", HAND_IN_S)
    assert postponed.gathers("big", HAND_IN_S)
    for _ in range(MANY // AT_ONCE):
        taken += postponed.take(HAND_IN_S)
    tickets = [one.arrival.request_id for one in taken if one.model == "big"]
    assert tickets == [f"r0:{number}" for number in range(MANY)]
    assert not postponed.by_router


def test_requests_of_every_model_are_queued_again_in_turn_when_their_router_reaches_more_engines() -> None:
    reached_by = {"r1": True}
    models = {
        name: ModelState(name, Admission(DEFAULT_POLICY), {"r0", "r1"}, {"e": EngineState(reached_by)})
        for name in ("big", "small")
    }
    avoided = Placements(lambda _: None)
    incarnation = Incarnation(Holder("r0"))
    for number in range(MANY):
        model = models["small" if number == MANY - 1 else "big"]
        request = ActorRequest("r0", incarnation, model, arrival(f"r0:{number}"), float(number))
        incarnation.requests[request.arrival.request_id] = request
        avoided.set(request)
    reached_by["r0"] = True
    for model in models.values():
        model.avoid_cache.clear()
    avoided.on_reachability("r0")
    first = [outdated for _ in range(3) if (outdated := avoided.next_outdated()) is not None]
    assert [(one.queue.name, one.arrived_s) for one in first] == [("big", 0.0), ("small", MANY - 1), ("big", 1.0)]
