"""The order of the times of `core.times`: every inequality that has to hold, and why."""

from __future__ import annotations

import ast
import re

import pytest

from serve_app.core import times
from serve_app.settings import AdmissionSettings, ModelSettings
from tests import times_picture
from tests.test_house import SHIPPED, sources

TIMES = {name: value for name, value in vars(times).items() if name.isupper()}
DEFAULTS = {  # of settings, which people change at their own risk
    "HEALTH_STALL_S": ModelSettings.model_fields["health_stall_s"].default,
    "MAX_WAIT_S": AdmissionSettings.model_fields["max_wait_s"].default,
}

ORDER = {
    # Router and quota actor
    "WATCH_S < ROUTER_SILENT_S": "a router that watches is not silent: its next watch call is a message",
    "ROUTER_HEARTBEAT_S + WATCH_S < FENCE_S": "a watch call that other messages put off is answered in time",
    "ROUTER_SILENT_S + ROUTER_LOOK_S < 1": "what a dead router held is free within a second",
    "ACTOR_RETRY_S < ROUTER_HEARTBEAT_S": "a new actor has the state of all routers before their heartbeats are due",
    "2 * ACTOR_TICK_S < ACTOR_STALL_S": "a tick that is one tick late is no standstill",
    "ACTOR_STALL_S < UNRESPONSIVE_S": "a standstill that is not made up for makes no router unresponsive",
    "ACTOR_STALL_S < ENGINE_SILENT_S": "a standstill that is not made up for makes no engine silent",
    "ROUTER_HEARTBEAT_S + ACTOR_STALL_S + 0.5 < OWNER_TTL_S": "nor does it end a lease, with half a second of transit",
    "UNRESPONSIVE_S < FENCE_S": "a router that hears nothing is granted nothing before it stops granting itself",
    "2 * ROUTER_HEARTBEAT_S < FENCE_S": "one lost heartbeat does not stop a router's credit",
    "FENCE_S + 0.5 <= OWNER_TTL_S": "a router stops granting before its account is another's: transit and clock drift",
    "OWNER_TTL_S + ACTOR_TICK_S < 5": "documents promise that a dead owner's leases are free within 5 s",
    "OWNER_TTL_S <= RECOVERY_S": "a router that was alive when the actor died can report before its part is given away",
    "FENCE_S < RECOVERY_S": "by the end of the recovery nobody grants from what the last actor gave",
    "ROUTER_HEARTBEAT_S + FENCE_S < MIN_SESSION_TTL_S": "a session in use is renewed, also over one lost message",
    "RECOVERY_S < MIN_OPEN_WAIT_S": "a session that is opened while the actor restarts is not refused for it",
    # Engine and quota actor
    "ENGINE_ASK_S < ENGINE_HEARTBEAT_S": "an engine that waits gets its turn sooner than one that runs reports",
    "ENGINE_HEARTBEAT_S < ENGINE_SILENT_S": "an engine that reports is not silent",
    "ENGINE_SILENT_S + NODE_LOOK_S < OWNER_TTL_S": "a dead engine is found by its processes before its lease ends",
    "ENGINE_HEARTBEAT_S + ENGINE_ANSWER_S + ENGINE_ASK_S < OWNER_TTL_S": "one lost report ends no engine's lease",
    "OWNER_TTL_S < LOADING_TTL_S": "an engine that loads is silent for longer than one that runs",
    "LOADING_TTL_S <= RECOVERY_S": "an engine that loads can report to a new actor before its memory is given away",
    # Quota actor, GCS and nodes
    "GCS_S < ENGINE_ANSWER_S": "an engine gets the error that names the GCS before it gives up the call",
    "GCS_S < FENCE_S": "so does a router",
    "GCS_S + UNRESPONSIVE_S < SESSION_ANSWER_S": "so does a session, for which all routers acknowledge first",
    "GCS_S < START_ANSWER_S": "so does the controller",
    "NODE_ANSWER_S < FIRST_NODES_S": "the first look has the answer of every node that gives one",
    "NODE_LIST_S + FIRST_NODES_S < DEVICES_S": "a starting engine waits longer than the first list and look take",
    "DEVICES_S < FIRST_LOOK_S": "an engine gives up by itself, and not by an error of an actor that is still looking",
    "2 * NODE_ANSWER_S < NODE_SILENT_S": "a node that misses a question keeps its watch",
    # Starts of engines
    "START_ASK_S < START_RENEW_S": "a start that waits gets its place sooner than a reservation is renewed",
    "START_RENEW_S < START_FRESH_S": "an answer is fresh until the next one",
    "START_FRESH_S < RESERVATION_TTL_S": "what a fresh answer says is reserved still is",
    "START_RENEW_S + START_ANSWER_S < RESERVATION_TTL_S": "one lost renewal ends no reservation",
    "START_ASK_S + START_ANSWER_S < START_WAIT_S": "one lost question sends no start to Ray",
    "CONTROLLER_SILENT_S <= RESERVATION_TTL_S": "reservations of an application that is gone end with its last renewal",
    "HEALTH_PERIOD_S + RESERVATION_TTL_S < RESTART_TTL_S": "Serve finds an ended engine, and asks, before that",
    # Router and engine replica
    "MAX_RETRY_PAUSE_S <= FIRST_EJECTION_S": "a replica that stays in use is tried as often as one that is ejected",
    "FIRST_EJECTION_S < MAX_EJECTION_S": "ejections grow",
    "MAX_EJECTION_S <= FORGET_EJECTIONS_S": "a replica that fails at every return keeps its count",
    "SILENCE_CHECK_S < SILENCE_FLOOR_S": "a silent replica is found, or asked, a second later at most",
    "CHANNEL_CONNECT_S < CHANNEL_ATTACH_S": "a connection that does not open has its own error",
    "CHANNEL_CONNECT_S < TICKET_LIFE_S": "a ticket outlives the opening of its connection",
    # Engine, its replica and Serve
    "ENGINE_LOOK_S < HEALTH_PERIOD_S": "the replica sees its dead engine before Serve asks",
    "HEALTH_STALL_S + ENGINE_LOOK_S + LAST_FRAMES_S < 3 * HEALTH_PERIOD_S": "and has ended before Serve would end it",
    "RANK_NODES_S < HEALTH_PERIOD_S": "a check that waits for Ray is over before the next one",
    "HEALTH_STALL_S < HEALTH_TIMEOUT_S": "a busy replica is not replaced for an answer that its engine delays",
    # Drain
    "LAST_FRAMES_S < MOVE_S": "a replica whose deadline is over sends its last frames before Serve ends it",
    "IDLE_CLOSE_S + DRAIN_POLL_S < MOVE_S": "an idle channel delays no drain",
    "MOVE_S < OVERDUE_S": "a router gives up an engine only after the engine should have ended",
    "PROXY_CHECK_S < MIN_DRAINING_S": "HAProxy sends a router nothing more before it is gone",
    "DRAIN_POLL_S < MIN_DRAINING_S": "an ending router is looked at while it still answers",
    "ROUTER_DRAIN_S <= HARD_STOP_S": "HAProxy cuts no stream that its router still sends",
    # HAProxy and machines
    "PROBE_IDLE_S + PROBES * PROBE_INTERVAL_S < MACHINE_CHECKS * (MACHINE_CHECK_S + MACHINE_ANSWER_S)": (
        "a client's connection to a lost machine breaks before its routers are replaced"
    ),
    "MACHINE_CHECKS * (MACHINE_CHECK_S + MACHINE_ANSWER_S) < MAX_WAIT_S": "requests that a lost machine held can go on",
    "3 * PROXY_CHECK_S + HEALTH_PERIOD_S < FALLBACK_S": "our HAProxy stands in until Serve's new one is there",
    # Requests with an Idempotency-Key, and limits
    "CLAIM_HEARTBEAT_S + CLAIM_CALL_S < CLAIM_RECOVERY_S": "one lost report of its runs makes no router's runs unknown",
    "OWNER_TTL_S < CLAIM_RECOVERY_S": "a router without a report to a new actor by then is not alive",
    "CLAIM_RECOVERY_S + CLAIM_CALL_S < CLAIM_WAIT_S": "a request outlasts the recovery of the claims",
    "OWNER_TTL_S + ACTOR_TICK_S < JOIN_S": "who waits for a dead router is told that it is dead, and runs the request",
    "PART_WAIT_S < JOIN_S": "a router that answers in time with nothing new is not given up",
    "RECOVERY_S < LIMIT_WAIT_S": "a request with limits outlasts the recovery of the actor",
    # Store, files, and rows of batches
    "USAGE_FLUSH_S < USAGE_HEARTBEAT_S": "a heartbeat is late by no more than a flush",
    "USAGE_HEARTBEAT_S + USAGE_ANSWER_S + 2 * USAGE_FLUSH_S < USAGE_SILENT_S": "one lost report ends no living router",
    "STORE_CALL_S <= USAGE_ANSWER_S": "a report has the store's own error",
    "ACTOR_RETRY_S < STORE_CALL_S": "a call is repeated while the store's actor restarts",
    "2 * ROW_RENEW_S + 0.5 < ROW_LEASE_S": "one lost renewal, which is repeated after half a second, ends no lease",
    "ROW_CLAIM_S + ROW_RENEW_S < ROW_LEASE_S": "rows whose claim was answered late are renewed in time",
    "ROW_LEASE_S + 2 < RUN_GRACE_S": "the next worker joins the runs of a dead one's rows, which still go on",
    "DATABASE_STATEMENT_S + DATABASE_SILENT_S < BATCH_CALL_S": "a batch worker has the database's own error",
    "FILES_CALL_S < BATCH_CALL_S": "and that of the files",
    "BUCKET_CALL_S < BATCH_CALL_S": "and that of the bucket",
    # Driver and command line
    "2 * STATUS_PERIOD_S < STATUS_FRESH_S": "a state that is written late once is still believed",
}


@pytest.mark.parametrize(("relation", "why"), ORDER.items(), ids=ORDER)
def test_one_time_is_shorter_than_another_because(relation: str, why: str) -> None:
    values = TIMES | DEFAULTS
    assert eval(relation, {}, values), why


def test_every_time_is_compared_with_another() -> None:
    compared = {name for relation in ORDER for name in re.findall(r"[A-Z_]{4,}", relation)}
    assert TIMES.keys() - compared == set()
    assert compared - TIMES.keys() - DEFAULTS.keys() == set()


def test_the_times_of_a_group_stand_in_their_order() -> None:
    for group in times_picture.groups():
        seconds = [time.value for time in group.times if time.name.endswith("_S")]
        assert seconds == sorted(seconds), group.title


def test_no_other_module_gives_one_of_these_names_a_value() -> None:
    found = [
        (path, target.id)
        for path, text in sources(*SHIPPED, "benchmarks").items()
        if path != "serve_app/core/times.py"
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in TIMES
    ]
    assert found == []


def test_the_picture_of_the_times_is_of_this_code() -> None:
    assert times_picture.PICTURE.read_text() == times_picture.picture(), "draw it anew: python -m tests.times_picture"
