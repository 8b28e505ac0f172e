"""The configuration changes while requests run: what a change names changes, and nothing else notices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cluster.local import RemoteDriver
from serve_app.names import deployment_of
from serve_app.settings import application, parse
from tests.e2e.changing import (
    CHANGED_S,
    KEY,
    LOGICAL_CPUS,
    OTHER,
    POLL_S,
    SLOTS,
    STEADY,
    Load,
    Place,
    configured,
    model,
    running,
    sizes,
)

BASE = configured(model(OTHER))
BROKEN = model("broken", max_model_len=8192, simulated={"kv_cache_tokens": 4096})  # its engine refuses that
LONG = 200  # tokens, two seconds: longer than a change takes to reach the router, shorter than patience
NEW_KEY = "sk-changes-another-key"
COMMAND_S = 120.0  # of one command: Python, Ray and the change, five seconds on an idle machine
# one replica a request, and no delays
QUICK = {"max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0, "downscale_delay_s": 0}
ENDLESS = 8000  # tokens: longer than any test
# likewise; of an engine, longer than another controller needs to be there
NEVER = 10_000.0
LOADING_S = 8.0


@pytest.fixture(scope="module")
def started(changing: Place) -> Place:
    changing.begin(BASE)
    return changing


@pytest.fixture(scope="module")
def load(started: Place) -> Iterator[Load]:
    running_load = Load(started.endpoint)
    yield running_load
    running_load.stop()


@pytest.fixture
def there(started: Place, load: Load) -> Iterator[Place]:
    """The cluster in its first configuration; after the test the load must have gone on where it was."""
    started.become(BASE)
    before = started.replicas(STEADY, "Router")
    yield started
    answered = load.answered
    assert started.replicas(STEADY, "Router") == before
    deadline = time.monotonic() + CHANGED_S
    while load.answered == answered:
        assert time.monotonic() < deadline, "the load has come to a stop"
        time.sleep(POLL_S)  # bound: CHANGED_S; an answer takes 50 ms
    assert load.failed == []


def test_a_model_is_added_while_the_others_go_on(there: Place) -> None:
    before = there.replicas()
    assert there.endpoint.ask("added").status == 404
    there.become(configured(model(OTHER), model("added")))
    assert there.endpoint.ask("added").status == 200
    after = there.replicas()
    assert len(after.pop("added")) == 1
    assert after == before
    assert [card["id"] for card in there.endpoint.get("/v1/models").json()["data"]] == [STEADY, OTHER, "added"]


def test_a_model_taken_out_finishes_what_runs_and_refuses_the_rest_by_name(there: Place) -> None:
    """Its engine stands still until the change has arrived, however long that takes on this machine."""

    def told() -> float:
        return there.endpoint.figure("serve_app_engine", model=OTHER, figure="generated_tokens") or 0.0

    before = told()
    streams = [there.endpoint.asking(OTHER, LONG, stream=True) for _ in range(SLOTS)]
    within(lambda: there.endpoint.figure("serve_app_slots", model=OTHER, state="granted") == SLOTS, "all slots taken")
    # a request without a first frame would be taken for one still on its way, and told that its model is gone
    within(lambda: told() >= before + 4 * SLOTS, "all have begun")
    with there.paused(OTHER):
        waiting = [there.endpoint.asking(OTHER, 3, stream=number == 1) for number in range(2)]
        within(lambda: there.endpoint.figure("serve_app_waiting", model=OTHER) == 2, "two wait")
        there.declare(configured())
        for answer in [one.answer() for one in waiting]:
            told = json.loads(answer.text)["error"]
            assert (answer.status, told["code"], told["param"]) == (404, "model_not_found", "model")
            assert repr(OTHER) in told["message"]
        assert there.endpoint.ask(OTHER).status == 404
        assert all(one.is_alive() for one in streams)
    for answer in [one.answer() for one in streams]:
        assert answer.whole
        assert answer.text.count('"finish_reason":null') == LONG
    there.wait_running(configured())
    assert [card["id"] for card in there.endpoint.get("/v1/models").json()["data"]] == [STEADY]
    for metric in ("serve_app_slots", "serve_app_waiting", "serve_app_engine", "serve_app_refused"):
        assert there.endpoint.figure(metric, model=OTHER) is None
        assert there.endpoint.figure(metric, model=STEADY) is not None


def test_a_changed_model_is_replaced_and_what_runs_there_finishes(there: Place) -> None:
    before = there.replicas()
    stream = there.endpoint.asking(OTHER, LONG, stream=True)
    within(lambda: there.endpoint.figure("serve_app_slots", model=OTHER, state="granted") == 1, "it runs")
    with there.paused(OTHER):
        there.declare(configured(model(OTHER, max_num_seqs=SLOTS + 1)))
        asked = [there.endpoint.asking(OTHER) for _ in range(5)]  # for the old replica, the new one, or in between
        there.wait(lambda state: running(state, [OTHER]).get(OTHER) not in (None, [], before[OTHER]), "a new replica")
        assert stream.is_alive()
    assert stream.answer().whole
    assert [one.answer().status for one in asked] == [200] * 5
    there.wait_running(BASE)
    after = there.replicas()
    assert after[STEADY] == before[STEADY]
    assert len(after[OTHER]) == 1
    assert after[OTHER] != before[OTHER]
    assert there.endpoint.ask(OTHER, n=SLOTS + 1).status == 200
    within(lambda: there.endpoint.figure("serve_app_slots", model=OTHER, state="total") == SLOTS + 1, "its new slots")


@pytest.mark.long
def test_with_room_for_it_the_new_replica_comes_before_the_old_one_leaves(there: Place) -> None:
    roomy = {"max_surge_percent": 100}
    there.become(configured(model(OTHER, replicas=roomy)))
    (before,) = there.replicas(OTHER)[OTHER]
    changed = configured(model(OTHER, replicas=roomy, generation=1))
    there.declare(changed)
    seen: list[list[str]] = []

    def replaced(state: dict[str, Any]) -> bool:
        if not state["models"]:
            return False  # Serve tells nothing of an application that it is building
        seen.append(running(state)[OTHER])
        return before not in seen[-1] and state["state"] == "running"

    there.wait(replaced, "the old replica is gone")
    assert all(seen)  # at no moment none
    assert there.endpoint.ask(OTHER).status == 200


def test_keys_are_taken_over_without_a_restart(there: Place) -> None:
    before = there.replicas()
    keys = [{"key": KEY}, {"key": NEW_KEY, "tenant": "another", "max_class": "low", "default_class": "low"}]
    assert there.endpoint.get("/health", NEW_KEY).status_code == 401
    there.become(configured(model(OTHER), auth={"keys": keys}))
    assert there.endpoint.ask(OTHER, key=NEW_KEY).status == 200
    assert there.endpoint.ask(OTHER, key=NEW_KEY, priority="high").status == 403
    there.become(BASE)
    assert there.endpoint.get("/health", NEW_KEY).status_code == 401
    assert there.replicas() == before


def test_bounds_of_the_line_and_of_requests_are_taken_over_without_a_restart(there: Place) -> None:
    before = there.replicas()
    assert there.endpoint.ask(OTHER, n=SLOTS).status == 200
    there.become(configured(model(OTHER), admission={"max_queued": 1}, http={"max_sequences": 1}))
    assert there.endpoint.ask(OTHER, n=SLOTS).status == 400
    asked = [there.endpoint.asking(OTHER, 3 * LONG) for _ in range(SLOTS)]
    # first, since one that is on its way to a free slot counts as waiting
    within(lambda: there.endpoint.figure("serve_app_engine", model=OTHER, figure="running") == SLOTS, "all slots run")
    asked += [there.endpoint.asking(OTHER, LONG) for _ in range(4)]
    answers = [one.answer() for one in asked]
    assert sorted(one.status for one in answers) == [200] * (SLOTS + 1) + [429] * 3
    assert there.replicas() == before


def test_scaling_bounds_change_without_a_restart(there: Place) -> None:
    before = there.replicas()
    there.become(configured(model(OTHER, replicas={"min_replicas": 2, "max_replicas": 2}, drain_s=30.0)))
    after = there.replicas()
    assert len(after[OTHER]) == 2
    assert set(before[OTHER]) < set(after[OTHER])
    bounds = {"min_replicas": 1, "max_replicas": 3, "downscale_delay_s": NEVER}
    there.become(configured(model(OTHER, replicas=bounds)))  # from a number to a range: a policy scales from here on
    assert there.replicas()[OTHER] == after[OTHER]


def test_batching_is_taken_over_without_a_restart_and_the_metrics_show_it(there: Place) -> None:
    before = there.replicas()
    there.become(configured(model(OTHER, batching="dynamic-32")))
    asked = [there.endpoint.asking(OTHER, 2 + 20 * number) for number in range(2 * SLOTS)]
    assert [one.answer().status for one in asked] == [200] * (2 * SLOTS)

    def told(figure: str) -> float:
        return there.endpoint.figure("serve_app_engine", model=OTHER, figure=figure) or 0.0

    assert told("batched_requests") == 2 * SLOTS
    assert 1.0 <= told("batch_size") <= SLOTS  # no more are granted at once, and so each batch waits in vain for 32
    assert told("batch_wait_s") > 0.0
    assert 0.0 <= told("padding_ratio") < 1.0
    assert told("tokens_per_s") > 0.0
    assert there.replicas() == before


def test_a_broken_model_takes_nothing_from_the_others(there: Place) -> None:
    before = there.replicas()
    there.declare(configured(model(OTHER), BROKEN))
    state = there.wait(lambda state: state["state"] == "failed", "the broken model is given up")
    assert f"{deployment_of('broken')}: " in state["message"]
    assert "kv_cache_tokens" in state["message"]
    assert running(state) == {**before, "broken": []}
    ready = there.endpoint.get("/ready")
    assert (ready.status_code, ready.json()["without_replica"]) == (200, ["broken"])
    assert there.endpoint.ask(OTHER).status == 200
    there.become(configured(model(OTHER), model("broken")))
    assert there.endpoint.ask("broken").status == 200


def test_the_same_configuration_again_does_nothing(there: Place) -> None:
    before = there.replicas()
    there.become(BASE)
    assert there.replicas() == before


@pytest.mark.long
def test_of_changes_that_overtake_each_other_the_last_one_counts(there: Place) -> None:
    before = there.replicas()
    for name in ("first", "second", "third"):
        there.declare(configured(model(OTHER), model(name)))
    there.wait_running(configured(model(OTHER), model("third")))
    assert there.endpoint.ask("third").status == 200
    assert there.endpoint.ask("first").status == 404
    assert {name: ids for name, ids in there.replicas().items() if name != "third"} == before


def test_a_controller_that_dies_forgets_no_change_and_restarts_nothing(there: Place) -> None:
    changed = configured(model(OTHER, generation=7), model("added"), admission={"max_queued": 5})
    there.become(changed)
    before = there.replicas()
    there.kill_controller()
    there.wait_running(changed)
    assert there.replicas() == before
    there.become(configured(model(OTHER, generation=7)))  # and it goes on changing what it is told
    assert there.endpoint.ask("added").status == 404
    after = there.replicas()
    assert after == {name: ids for name, ids in before.items() if name != "added"}


def test_an_engine_that_loads_while_the_controller_dies_goes_on_loading(there: Place) -> None:
    there.declare(configured(model(OTHER), model("loads", simulated={"start_s": LOADING_S})))
    within(lambda: there.loading("loads"), "it loads")
    before = there.loading("loads")
    there.kill_controller()
    there.wait_serving("loads")
    assert there.processes(deployment_of("loads")) == before


@pytest.mark.long
def test_a_model_taken_out_and_put_back_at_once_goes_on_when_its_former_self_ends(there: Place) -> None:
    """What the former one still runs outlives the change; when that is over, nothing of the new one may end with it."""
    (before,) = there.replicas(OTHER)[OTHER]
    with there.endpoint.streaming(OTHER, ENDLESS) as lines:
        next(lines)
        there.declare(configured())
        within(lambda: there.endpoint.ask(OTHER).status == 404, "it is taken out")
        there.declare(BASE)
        within(lambda: there.endpoint.ask(OTHER).status == 200, "it is back")
        assert next(lines).startswith(b"data: {")
    there.wait_running(BASE)
    (after,) = there.replicas(OTHER)[OTHER]
    assert after != before
    os.kill(there.process(deployment_of(OTHER)), signal.SIGKILL)
    within(lambda: there.replicas(OTHER)[OTHER] not in ([], [after]), "another replica")
    assert there.endpoint.ask(OTHER).status == 200


@pytest.mark.long
def test_a_configuration_that_serve_cannot_build_is_taken_back(there: Place) -> None:
    """Where the cluster's release of ours knows less than the one here; the check here has let it pass."""
    before = there.replicas()
    entry = application(parse(BASE).without_secrets())
    entry["args"]["models"][1]["unheard_of"] = True
    remote = RemoteDriver(
        {
            "do": "declare",
            "environment": there.cluster.environment(),
            "application": entry,
            "serve": there.options,
            "wait": True,
            "roll_back": True,
            "models": [],
        }
    )
    try:
        told = remote.event(COMMAND_S)
    finally:
        remote.close()
    assert told is not None
    assert told["event"] == "error"
    assert "models.1.unheard_of: unknown key; the previous declaration is declared again" in told["message"]
    there.wait_running(BASE)
    assert there.replicas() == before


def test_serve_app_deploy_changes_the_running_instance(there: Place, tmp_path: Path) -> None:
    before = there.replicas()
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(configured(model(OTHER), model("added"))))
    done = command(there, "deploy", "--config", str(file))
    assert done.returncode == 0, done.stderr
    assert "running" in done.stdout
    assert "added 1/1" in done.stdout
    assert there.endpoint.ask("added").status == 200
    assert {name: ids for name, ids in there.replicas().items() if name != "added"} == before
    file.write_text(yaml.safe_dump({**configured(), "modles": []}))
    wrong = command(there, "deploy", "--config", str(file))
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.endswith(f"error: modles: unknown key\n  -> did you mean models?\n{file}: 1 error\n")


@pytest.mark.long  # in parts: cli/test_deploy.py, cluster/local/test_wait_reasons.py, and the next test
def test_what_has_no_place_holds_up_no_deploy_and_goes_with_its_load(there: Place, tmp_path: Path) -> None:
    wide = model("wide", cpus_per_rank=4, replicas=QUICK)  # there is a place for one
    huge = model("huge", cpus_per_rank=LOGICAL_CPUS + 1)  # and none
    there.become(configured(model(OTHER), wide))
    before = there.replicas()
    file = tmp_path / "my.yaml"
    with there.endpoint.streaming("wide", ENDLESS), there.endpoint.streaming("wide", ENDLESS):
        there.declare(configured(model(OTHER), wide, huge))
        message = there.wait(lambda state: state["message"].count("1 replica waits") == 2, "both wait")["message"]
        assert "s for 4 CPUs on one node, which are not free: 3 of 8 CPUs on 127.0.0.1" in message
        assert "s for 9 CPUs on one node, and no node has that; the largest has 8 CPUs" in message
        file.write_text(yaml.safe_dump(configured(model(OTHER, generation=1), wide, huge)))
        refused = command(there, "deploy", "--config", str(file))
        assert (refused.returncode, "error: models.3.cpus_per_rank" in refused.stderr) == (2, True), refused.stderr
        done = command(there, "deploy", "--config", str(file), "--no-check")
        assert (done.returncode, done.stderr) == (0, "")
        assert "not waited for: engine-huge (updating)" in done.stdout
        after = there.replicas()
        assert after.pop(OTHER) != before.pop(OTHER)
        assert {**after, "huge": []} == {**before, "huge": []}
    there.wait(lambda state: sizes(state)["wide"] == (1, 1), "the second replica is called off, and gone")
    there.become(configured(model(OTHER, generation=1), wide))  # without the one that never had a place


def test_a_deploy_ends_under_a_load_that_wants_more_replicas_than_have_a_place(there: Place, tmp_path: Path) -> None:
    wide = model("wide", cpus_per_rank=4, replicas=QUICK, drain_s=2)  # there is a place for one
    there.become(configured(model(OTHER), wide))
    before = there.replicas("wide")
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(configured(model(OTHER), wide | {"generation": 1})))
    with there.endpoint.streaming("wide", ENDLESS), there.endpoint.streaming("wide", ENDLESS):
        there.wait(lambda state: "1 replica waits" in state["message"], "a second one waits")
        done = command(there, "deploy", "--config", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert "! engine-wide (2 replicas): restarted" in done.stdout
    after = there.replicas("wide")["wide"]
    assert after
    assert not set(after) & set(before["wide"])


def test_a_router_that_starts_later_has_the_present_configuration(started: Place, load: Load) -> None:
    """The last of this module: what is on its way through a router that is killed is lost."""
    load.stop()
    keys = {"keys": [{"key": NEW_KEY}]}
    started.become({**configured(model("added")), "auth": keys})
    before = started.replicas("Router")
    os.kill(started.process("Router"), signal.SIGKILL)
    started.wait(lambda state: running(state)["Router"] not in ([], before["Router"]), "another router")
    within(lambda: started.endpoint.get("/ready", NEW_KEY).status_code == 200, "the endpoint is back")
    assert started.endpoint.get("/health").status_code == 401
    assert started.endpoint.ask("added", key=NEW_KEY).status == 200
    assert started.endpoint.ask(OTHER, key=NEW_KEY).status == 404


def within(condition: Any, what: str) -> None:
    """Until it is so; bound: CHANGED_S."""
    deadline = time.monotonic() + CHANGED_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {CHANGED_S} s: {what}"
        time.sleep(POLL_S)  # bound: CHANGED_S


def command(there: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`serve-app` on this instance."""
    name = there.cluster.instance.name
    folder = there.cluster.state.folder.parent
    line = [sys.executable, "-m", "serve_app.cli", *arguments, "--instance", name, "--state-dir", str(folder)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return subprocess.run(
        line, env=environment | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
