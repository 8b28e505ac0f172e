"""The ledger in plain figures, and what `serve-app status` makes of who waits."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from autoscaling.operations.quota_state import with_quota_figures
from serve_app.cli.progress import replica_states
from serve_app.cli.quota import show
from serve_app.core.batches import BatchRecord, BatchStatus, BatchWork, ModelFigures
from serve_app.core.memory import (
    Device,
    DrainReport,
    DrainRequest,
    EngineReport,
    Rank,
    SessionRequest,
    Start,
    StartReport,
    StartsRequest,
)
from serve_app.core.memory.crash_loops import FREE
from serve_app.core.queue import Arrival
from serve_app.core.queue.admission import QueuePolicy
from serve_app.core.quota import Quota
from serve_app.core.shared_queue import RouterMessage
from serve_app.core.shared_queue.messages import (
    AccountReport,
    Amount,
    Arrive,
    CreditRequest,
    EngineReachability,
    Hello,
    ModelPolicy,
    RouterEvent,
)
from serve_app.quota.report import figures
from serve_app.router.metrics import ClusterAnswers, cluster_families
from serve_app.store import StoreFigures
from serve_app.types import RequestClass

GB = 10**9
POLICY = QueuePolicy(max_queued=10, max_wait_s=60.0)


@pytest.fixture
def core() -> Quota:
    """One engine of 60 of 78 GB, one that waits, a router and a session."""
    quota = Quota(3, {}, 0.0)
    quota.on_devices([Device("n", 0, 80 * GB), Device("n", 1, 10 * GB)], 0.0)
    report = EngineReport("e", "m", (Rank("n", 0),), 60 * GB, 60 * GB)
    holds = quota.on_engine(report, 0.0).holds
    runs = replace(report, holds=holds, kv_tokens=1600, kv_bytes=1, measured_bytes=(61 * GB,), slots=2)
    quota.on_engine(runs, 0.0)
    quota.on_engine(EngineReport("w", "big", (Rank("n", 0),), 30 * GB, 20 * GB), 0.0)
    events = (Hello(()), ModelPolicy("m", POLICY), EngineReachability("m", "e", True), CreditRequest("e", 0, 0))
    quota.on_exchange(RouterMessage("r", 1, 3, 1, events, 0, 0), 0.0)
    quota.on_open_session(SessionRequest("s", "m", 50, 60.0, None, "0.25 GB"), 0.0)
    return quota


def test_devices_add_up_and_it_is_all_json(core: Quota) -> None:
    found = json.loads(json.dumps(figures(core, 2.0)))
    assert (found["total_bytes"], found["reserved_bytes"]) == (90 * GB, 4 * GB)
    assert (found["granted_bytes"], found["free_bytes"]) == (60 * GB, 26 * GB)
    assert found["devices"][0]["percent"] == 76.9
    assert found["epoch"] == 3
    assert not found["recovering"]
    assert found["fragmentation"] == found["fragmentation_by_node"]["n"] == 1.0, "neither 18 nor 8 are 20"
    assert found["fragmented"]
    assert not figures(core, 2.0, 1.0)["fragmented"]


def test_a_cluster_whose_free_memory_is_of_no_use_says_so(core: Quota) -> None:
    def reported(defrag_above: float | None) -> str:
        console = Console(file=io.StringIO(), width=200)
        show(figures(core, 2.0, defrag_above), console)
        return console.file.getvalue()  # type: ignore[attr-defined]

    assert "100% of what is free lies where the models here do not fit" in reported(None)
    assert "do not fit" not in reported(1.0)


def test_an_engine_shows_its_tokens_and_whose_they_are(core: Quota) -> None:
    (engine,) = figures(core, 2.0)["engines"]
    assert engine["devices"] == {"n/0": 60 * GB}
    assert engine["kv_tokens_by_router"] == {"r": 720}
    assert (engine["kv_tokens_routers"], engine["kv_tokens_sessions"], engine["kv_tokens_free"]) == (720, 50, 670)
    assert engine["state"] == "committed"


def test_who_waits_is_there_with_what_is_missing(core: Quota) -> None:
    (waiting,) = figures(core, 2.0)["waiting"]
    assert (waiting["state"], waiting["waits_s"]) == ("blocked: memory", 2.0)
    assert waiting["why"] == "n/0: at least 20.00 GB needed, 18.00 GB free"


def test_what_is_used_beyond_the_grant_is_an_alarm(core: Quota) -> None:
    (alarm,) = figures(core, 2.0)["alarms"]
    assert (alarm["replica"], alarm["granted_bytes"], alarm["measured_bytes"]) == ("e", 60 * GB, 61 * GB)


@pytest.mark.parametrize(("measured", "shown"), [((5,), 5), ((None,), None), ((), None)])
def test_what_could_not_be_measured_is_not_shown_as_nothing(core: Quota, measured: Any, shown: int | None) -> None:
    reported = core.grants.last_report("e")
    assert reported is not None
    core.on_engine(replace(reported, measured_bytes=measured), 1.0)
    assert figures(core, 2.0)["engines"][0]["measured_bytes"] == shown


def samples(found: dict[str, Any] | None, work: list[BatchWork] | None) -> dict[str, dict[tuple[str, ...], float]]:
    """The samples of `cluster_families` at 100 s, by name and values of labels."""
    store = None if work is None else StoreFigures(work)
    families = cluster_families(ClusterAnswers(found, store), {}, 100.0).collect()
    return {
        family.name.removeprefix("serve_app_"): {tuple(one.labels.values()): one.value for one in family.samples}
        for family in families
        if family.samples
    }


def test_the_ledger_is_in_the_metrics_by_device_and_kind(core: Quota) -> None:
    found = samples(figures(core, 2.0), None)
    memory = found["gpu_memory_bytes"]
    assert memory == {
        ("n", "n/0", "reserved"): 2 * GB, ("n", "n/0", "granted"): 60 * GB, ("n", "n/0", "free"): 18 * GB,
        ("n", "n/1", "reserved"): 2 * GB, ("n", "n/1", "granted"): 0, ("n", "n/1", "free"): 8 * GB,
    }  # fmt: skip
    assert found["replica_memory_bytes"] == {("m", "e", "granted"): 60 * GB, ("m", "e", "measured"): 61 * GB}
    assert found["kv_tokens"]["m", "e", "total"] == 1600
    assert found["kv_tokens"]["m", "e", "sessions"] == 50
    assert found["kv_used_ratio"]["m", "e"] == found["kv_tokens"]["m", "e", "used"] / 1600
    assert found["replicas"] == {("m", "running"): 1, ("big", "blocked"): 1}
    assert found["sessions"] == {("m", "open"): 1}
    short = figures(core, 2.0) | {"short": [{"model": "big", "why": "no memory"}]}
    assert samples(short, None)["replicas_short"] == {("big",): 1}
    assert found["up"] == {("quota_actor",): 1, ("store",): 0, ("controller",): 0, ("haproxy",): 0}


def test_a_replica_that_drains_is_not_called_running(core: Quota) -> None:
    core.drain(DrainRequest("e", 30.0), 2.0)
    assert samples(figures(core, 2.0), None)["replicas"]["m", "draining"] == 1


def test_batches_are_in_the_metrics_by_state_with_the_age_of_the_oldest() -> None:
    def batch(name: str, created_at: float, completed: int) -> BatchRecord:
        status = BatchStatus.IN_PROGRESS
        of_batch = BatchRecord(name, "acme", "key", "/v1/completions", "file-1", "24h", status, created_at, 9e9)
        return replace(of_batch, total=20, completed=completed, failed=1)

    work = [BatchWork(batch("a", 40.0, 5), {"m": 3, "n": 1}, 2), BatchWork(batch("b", 90.0, 1), {}, 4)]
    found = samples(None, work)
    assert found["batch_rows"] == {("waiting",): 4, ("running",): 6, ("completed",): 6, ("failed",): 2}
    assert found["batches"] == {("in_progress",): 2}
    assert found["oldest_batch_age_seconds"] == {(): 60}
    assert samples(None, [])["oldest_batch_age_seconds"] == {(): 0}


def state(*replicas: str, running: bool = False) -> dict[str, Any]:
    word = "RUNNING" if running else "STARTING"
    model = {
        "name": "big",
        "deployment": "engine-big",
        "state": "updating",
        "message": "",
        "replicas": [{"id": one, "state": word, "node": ""} for one in replicas],
    }
    return {"state": "starting", "message": "", "models": [model], "routers": []}


def test_status_says_that_a_model_is_blocked_and_by_how_much(core: Quota) -> None:
    found = with_quota_figures(state("w"), figures(core, 2.0))
    (model,) = found["models"]
    assert model["state"] == "blocked: memory"
    assert model["message"] == (
        "1 replica waits for 30.00 GB of memory (at least 20.00 GB): n/0: at least 20.00 GB needed, 18.00 GB free"
    )
    assert found["message"] == f"engine-big: {model['message']}"


def test_status_says_nothing_of_replicas_that_have_left_or_of_other_models(core: Quota) -> None:
    found = figures(core, 2.0)
    another = with_quota_figures(state("another"), found)
    assert (another["message"], another["models"][0]["message"]) == ("", "")
    other = state("w")
    other["models"][0]["name"] = "other"
    assert with_quota_figures(other, found)["message"] == ""


def test_status_has_how_far_the_start_of_each_replica_is(core: Quota) -> None:
    start = StartReport("loading", 12.0, 0.43, None, 31.0)
    core.on_engine(EngineReport("x", "m", (Rank("n", 1),), GB, GB, start=start), 1.0)
    (reported,) = json.loads(json.dumps(figures(core, 2.0)))["starting"]
    assert (reported["replica"], reported["phase"], reported["share"], reported["last_s"]) == (
        "x",
        "loading",
        0.43,
        31.0,
    )
    found = with_quota_figures(state("x", "e"), figures(core, 2.0))
    assert [one["start"] and one["start"]["phase"] for one in found["models"][0]["replicas"]] == ["loading", None]
    assert replica_states(found | {"models": [found["models"][0] | {"target": 2}]}) == (
        "big 0/2 (loading 40%, last start 31 s, starting)"
    )


def test_status_names_who_uses_more_than_it_was_granted_and_says_that_it_drains(core: Quota) -> None:
    reported = core.grants.last_report("e")
    assert reported is not None
    core.on_engine(replace(reported, measured_bytes=(61 * GB,)), 1.0)
    found = figures(core, 2.0)
    assert with_quota_figures(state("e", running=True), found)["message"] == (
        "engine-big: e uses 61.00 GB of 60.00 GB granted"
    )
    drains = with_quota_figures(state("e", running=True), found | {"draining": ["e"]})
    assert drains["message"].endswith("granted; it drains")


def test_status_says_that_engines_of_a_model_crash_soon_after_their_start(core: Quota) -> None:
    for _ in range(FREE + 2):
        core.grants.crash_loops.on_crash("big", 10.0, 1.0, 1.0)
    found = with_quota_figures(state("e", running=True), figures(core, 2.0))
    assert found["message"].startswith(
        f"engine-big: {FREE + 2} engines crashed soon after their start; the next one waits 9 s (serve-app logs big)"
    )


def test_status_says_why_an_engine_died_that_had_started_unless_a_start_has_failed_since(core: Quota) -> None:
    core.grants.crash_loops.record_failure("big", "the engine died: CUDA error", 2.0)
    found = with_quota_figures(state("e", running=True), json.loads(json.dumps(figures(core, 14.0))))
    cause = "an engine failed 12 s ago: the engine died: CUDA error"
    assert found["models"][0]["cause"] == cause
    assert found["message"].startswith(f"engine-big: {cause}")
    later = state("e", running=True)
    later["models"][0]["cause"] = "no weights"
    later["message"] = "engine-big: no weights"
    assert with_quota_figures(later, figures(core, 14.0))["message"].startswith("engine-big: no weights")
    assert "CUDA" not in with_quota_figures(later, figures(core, 14.0))["message"]
    console = Console(file=io.StringIO(), width=200)
    show(figures(core, 14.0), console)
    assert f"big: {cause}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_wait_does_not_hide_why_a_replica_has_failed(core: Quota) -> None:
    waiting = state("w")
    failed = waiting["models"][0] | {"name": "bad", "deployment": "engine-bad", "replicas": [], "cause": "no weights"}
    waiting["models"][0]["cause"] = "out of memory"
    reported = with_quota_figures(waiting | {"models": [*waiting["models"], failed]}, figures(core, 2.0))["message"]
    assert reported.startswith("engine-big: 1 replica waits for 30.00 GB")
    assert reported.endswith("; engine-big: out of memory; engine-bad: no weights")


def test_status_shows_which_replicas_drain_and_what_still_runs_there(core: Quota) -> None:
    reported = core.grants.last_report("e")
    assert reported is not None
    core.drain(DrainRequest("e", 30.0), 1.0)
    core.on_engine(replace(reported, drain=DrainReport(29.0, running=4)), 2.0)
    (replica,) = with_quota_figures(state("e", running=True), figures(core, 2.0))["models"][0]["replicas"]
    assert replica["state"] == "DRAINING"
    assert (replica["drain"]["running"], replica["drain"]["left_s"]) == (4, 29.0)
    core.on_engine(replace(reported, gone=True, drain=DrainReport(0.0, moved=4)), 30.0)
    (replica,) = with_quota_figures(state("e", running=True), figures(core, 31.0))["models"][0]["replicas"]
    assert (replica["state"], replica["drain"]["ended"]) == ("DRAINING", True)  # Serve sees its end later


def test_what_keeps_a_model_from_more_replicas_is_behind_the_reason_of_its_target() -> None:
    nobody: dict[str, Any] = {"state": "running", "message": "", "replicas": []}
    model = nobody | {"name": "m", "why": "9 requests: 3 wanted"}
    other = nobody | {"name": "o", "why": "1 request: 1 wanted"}
    core = Quota(1, {}, 0.0)
    found = with_quota_figures(
        state() | {"models": [model, other]},
        figures(core, 1.0) | {"short": [{"model": "m", "why": "memory: 1 needed, 0 free"}]},
    )
    assert [one["why"] for one in found["models"]] == [
        f"{model['why']}; held back: memory: 1 needed, 0 free",
        other["why"],
    ]


def test_what_is_kept_for_starts_is_in_the_figures() -> None:
    core = Quota(1, {}, 0.0)
    core.on_devices([Device("n", 0, 100, 0)], 0.0)
    core.on_starts(StartsRequest("m", (Start("r", ("n",)),), 1, ("n",), 60), 0.0)
    found = json.loads(json.dumps(figures(core, 1.0)))
    assert found["kept"] == [{"model": "m", "device": "n/0", "bytes": 60, "replica": "r", "after": ""}]
    assert found["short"] == [{"model": "m", "why": "memory: at least 0.00 GB needed on one device, 0.00 GB free"}]


def with_queue(core: Quota) -> Quota:
    """Two slots; of two tenants one has both, and waits with two more; a batch waits behind it."""
    arrivals = [
        Arrival(f"r:{number}", level, tenant, 1, 100)
        for number, (level, tenant) in enumerate(
            [(RequestClass.HIGH, "a")] * 4 + [(RequestClass.LOW, "b")],
        )
    ]
    events: tuple[RouterEvent, ...] = (Hello(()), ModelPolicy("m", POLICY), EngineReachability("m", "e", True))
    events += tuple(Arrive("m", one, 0.0) for one in arrivals)
    core.on_exchange(RouterMessage("r", 2, core.epoch, 1, events, 0, 0), 1.5)
    return core


def test_a_queue_shows_which_tenants_wait_which_hold_what_and_which_routers_submit(core: Quota) -> None:
    (queue,) = json.loads(json.dumps(figures(with_queue(core), 2.0)))["queues"]
    assert (queue["model"], queue["routers"], queue["replicas"], queue["contended"]) == ("m", ["r"], ["e"], True)
    assert {name: level["waiting"] for name, level in queue["classes"].items() if level["waiting"]} == {
        "high": 2,
        "low": 1,
    }
    assert queue["classes"]["high"]["granted"] == 2
    assert queue["tenants"]["a"]["slots"] == queue["tenants"]["a"]["waiting"] == 2
    assert queue["oldest_wait_s"] == 0.5


def test_the_queues_have_their_former_name_beside_the_new_one(core: Quota) -> None:
    found = figures(with_queue(core), 2.0)
    assert found["lines"] == found["queues"]


@pytest.mark.parametrize("missing", [set(), {"queues"}], ids=["this release", "an actor of 0.5"])
def test_who_waits_for_a_place_is_in_the_tables_of_serve_app_quota(core: Quota, missing: set[str]) -> None:
    quiet = io.StringIO()
    busy = io.StringIO()
    show(figures(core, 2.0), Console(file=quiet))
    found = figures(with_queue(core), 2.0)
    show({name: value for name, value in found.items() if name not in missing}, Console(file=busy))
    rows = [line.split("\t") for line in busy.getvalue().splitlines() if line.startswith("queue\t")]
    assert [(row[1], row[2], row[3], row[7]) for row in rows] == [
        ("m", "high", "2", "0.5 s"),
        ("m", "low", "1", "0.5 s"),
    ]
    assert "queue\t" not in quiet.getvalue()


def test_figures_for_batches_tell_by_model_what_is_busy_and_what_waits() -> None:
    quota = Quota(3, {}, 0.0)
    quota.on_devices([Device("n", 0, 80 * GB)], 0.0)
    report = EngineReport("e", "m", (Rank("n", 0),), 60 * GB, 60 * GB)
    holds = quota.on_engine(report, 0.0).holds
    quota.on_engine(replace(report, holds=holds, kv_tokens=1600, kv_bytes=1, slots=4), 0.0)
    events: list[RouterEvent] = [Hello(()), ModelPolicy("m", POLICY), ModelPolicy("asleep", POLICY)]
    seq = 1

    def sent(*more: RouterEvent) -> dict[str, ModelFigures]:
        nonlocal seq
        quota.on_exchange(RouterMessage("r", 1, 3, seq, more, 0, 0), 0.1 * seq)
        seq += len(more)
        return quota.model_figures()

    def arrival(name: str, level: RequestClass, slots: int = 1) -> Arrive:
        return Arrive("m", Arrival(name, level, "t", slots, 10), 0.0)

    none = ModelFigures(0, 0, 0, 0)
    assert sent(*events) == {"m": none, "asleep": none}, "no router reaches the engine"
    idle = {"m": ModelFigures(4, 0, 0, 0), "asleep": none}
    assert sent(EngineReachability("m", "e", True)) == idle
    assert sent(CreditRequest("e", 0, 0)) == idle, "credit that no request holds is not busy"
    held = AccountReport((Amount("e", 1, 100),), (Amount("e", 2, 720),), 0)
    assert sent(held)["m"].busy == 1, "what requests hold by credit is"
    busy = sent(*(arrival(f"low {number}", RequestClass.LOW, 2) for number in range(2)))["m"]
    assert (busy.slots, busy.busy, busy.waiting, busy.waiting_low) == (4, 4, 2, 2)
    assert sent(arrival("high", RequestClass.HIGH))["m"] == ModelFigures(4, 4, 3, 2)
