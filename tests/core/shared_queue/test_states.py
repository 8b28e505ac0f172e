"""The tables of states: what they allow, that they are whole, and that the document shows them."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from serve_app.core.queue import Grant
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.states import (
    REQUEST,
    ROUTER_SESSION,
    TABLES,
    TICKET,
    OwnEvent,
    PeerEvent,
    RequestAction,
    RequestState,
    RequestStep,
    RouterSessionReply,
    RouterSessionState,
    RouterSessionStep,
    StateTable,
    TicketEvent,
    TicketState,
    UnexpectedEvent,
)
from serve_app.types import RequestClass
from tests import states_table
from tests.core.shared_queue.test_applied_events import sessions
from tests.core.shared_queue.test_faults import connected

IGNORED = {"SessionDraw"}  # of an actor of a release before
of_each_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)


@of_each_table
def test_every_state_is_reached_from_the_first_ones(table: StateTable[Any]) -> None:
    born = {row.then for row in table.rows if not row.states}
    reached = born or {next(iter(table.states))}
    while (
        more := {
            table.after(state, event)
            for state in reached
            for event in table.events
            if isinstance(event, PeerEvent) or any(event in row.events and state in row.states for row in table.rows)
        }
        - reached
    ):
        reached |= more
    assert reached == set(table.states)


@of_each_table
def test_every_event_has_a_row_and_none_has_two_in_one_state(table: StateTable[Any]) -> None:
    rows = [(state, event) for row in table.rows for state in row.states or (None,) for event in row.events]
    assert len(rows) == len(set(rows))
    assert {event for _, event in rows} == set(table.events)


@pytest.mark.parametrize("ended", [(REQUEST, RequestState.ENDED), (TICKET, TicketState.ENDED)])
def test_an_end_is_final_whatever_the_other_side_still_sends(ended: tuple[StateTable[Any], Any]) -> None:
    table, state = ended
    for event in table.events:
        then = state
        if isinstance(event, PeerEvent) or any(event in row.events and state in row.states for row in table.rows):
            then = table.after(state, event)
        assert then is state


def test_every_message_about_queues_and_accounts_is_in_a_table() -> None:
    sent = get_args(messages.RequestEvent | messages.CreditEvent | messages.SessionEvent)
    answered = get_args(messages.RequestAction | messages.CreditAction)
    others = (messages.Booked, messages.EngineDropAcknowledged, messages.SessionEntry, messages.SessionEnded)
    named = set(re.findall(r"`([A-Z][a-z]\w+)`", states_table.tables()))
    assert {one.__name__ for one in (*sent, *answered, *others)} - IGNORED <= named


def test_an_event_of_this_side_that_cannot_be_raises_and_changes_nothing() -> None:
    with pytest.raises(UnexpectedEvent, match="Request in the router: 'it ends' while WAITING"):
        REQUEST.after(RequestState.WAITING, RequestStep.DONE)


@of_each_table
def test_an_illegal_message_of_the_other_side_leaves_the_state_as_it_is(table: StateTable[Any]) -> None:
    for state in table.states:
        for event in table.events:
            if isinstance(event, PeerEvent) and table.is_illegal(state, event):
                assert table.after(state, event) is state


@pytest.mark.parametrize(
    ("table", "state", "event"),
    [
        (ROUTER_SESSION, RouterSessionState.BOOKED, RouterSessionReply.BOOKED),
        (REQUEST, RequestState.RUNNING, RequestAction.GRANT),
        (REQUEST, RequestState.SUBMITTED, RequestAction.TOKENS),
        (TICKET, TicketState.RUNNING, TicketEvent.ARRIVE),
        (TICKET, TicketState.WAITING, TicketEvent.DONE),
    ],
)
def test_only_a_faulty_peer_sends_these(table: StateTable[Any], state: Any, event: PeerEvent) -> None:
    assert table.is_illegal(state, event)


def test_a_session_is_booked_once_and_lost_and_found_as_often_as_calls_fail() -> None:
    state = RouterSessionState.NEW
    seen = []
    events: list[OwnEvent | PeerEvent] = [
        RouterSessionReply.OTHER,
        RouterSessionReply.BOOKED,
        RouterSessionStep.LOST,
        RouterSessionReply.OTHER,
    ]
    for event in [*events, RouterSessionReply.STALE]:
        state = ROUTER_SESSION.after(state, event)
        seen.append(state.name)
    assert seen == ["NEW", "BOOKED", "ALONE", "BOOKED", "NEW"]


def test_the_document_shows_these_tables() -> None:
    text = states_table.DOCUMENT.read_text()
    assert states_table.written(text) == text, "write them anew: python -m tests.states_table"


def test_an_event_that_its_requests_state_does_not_have_ends_its_routers_session_alone() -> None:
    world = connected(slots=1, routers=2)
    runs = world.arrive("r0", RequestClass.NORMAL)
    world.settle(2)
    waits = world.arrive("r1", RequestClass.NORMAL)
    world.settle(2)
    assert (runs.state, waits.state) == ("runs", "waits")
    before = sessions(world)
    router_queue = world.routers["r1"].queue
    router_queue.router_session.put(messages.Done(router_queue.pending.by_request_id[f"q{waits.number}"].ticket, 1, 1))
    world.settle(4)
    (note,) = world.quota.queue.take_notes()
    assert "Request at the actor: '`Done`' while WAITING" in note
    after = sessions(world)
    assert (after["r0"], after["r1"] > before["r1"]) == (before["r0"], True)
    world.finish("r0", f"q{runs.number}")
    world.settle(4)
    assert waits.state == "runs", "its router has handed it in again"
    world.finish("r1", f"q{waits.number}")
    world.settle(4)
    world.accounted()


def test_an_action_that_its_requests_state_does_not_have_is_named_and_changes_no_account() -> None:
    world = connected(slots=1, routers=1)
    runs = world.arrive("r0", RequestClass.NORMAL)
    world.settle(2)
    router_queue = world.routers["r0"].queue
    ticket = router_queue.in_flight.running[f"q{runs.number}"].ticket
    world.quota.queue.router_sessions.send("r0", Grant(ticket, "e", 0.0))
    world.settle(2)
    (failed,) = router_queue.applied.failed
    assert str(failed.error) == "Request in the router: '`Grant`' while RUNNING"
    router_queue.applied.failed.clear()
    world.finish("r0", f"q{runs.number}")
    world.settle(4)
    world.accounted()


def test_the_end_of_a_request_that_waits_is_a_fault_of_the_caller() -> None:
    world = connected(slots=1, routers=1)
    world.arrive("r0", RequestClass.NORMAL)
    world.settle(2)
    waits = world.arrive("r0", RequestClass.NORMAL)
    with pytest.raises(UnexpectedEvent, match="'it ends' while SUBMITTED"):
        world.routers["r0"].queue.on_done(f"q{waits.number}", world.now, 1, 1)
    assert world.routers["r0"].queue.on_done("unknown", world.now, 1, 1) == []
