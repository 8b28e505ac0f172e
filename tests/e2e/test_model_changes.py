"""The configuration changes while requests run: what a change names changes, and nothing else notices."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
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
    SLOTS,
    STEADY,
    Load,
    Place,
    configured,
    model,
    running,
    sizes,
)
from tests.waiting import patient, wait_until

BASE = configured(model(OTHER))
CANARY = Path(__file__).parents[2] / "docs" / "tutorials" / "canary.md"
SESSIONS = 60  # with 90 to 10, all of one target once in 500; which sessions there are is fixed, so never by chance
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
PAUSE_S = 0.05  # between two requests of the load: a change takes seconds, and beside a load without a pause more


@pytest.fixture(scope="module")
def started(changing: Place) -> Place:
    changing.begin(BASE)
    return changing


@pytest.fixture(scope="module")
def load(started: Place) -> Iterator[Load]:
    running_load = Load(started.endpoint, pause_s=PAUSE_S)
    yield running_load
    running_load.stop()


@pytest.fixture
def place(started: Place, load: Load) -> Iterator[Place]:
    """The cluster in its first configuration; after the test the load must have gone on where it was."""
    started.become(BASE)
    before = started.replicas(STEADY, "Router")
    yield started
    answered = load.answered
    assert started.replicas(STEADY, "Router") == before
    wait_until(lambda: load.answered > answered, CHANGED_S, "the load goes on")
    assert load.failed == []


def test_a_model_is_added_while_the_others_go_on(place: Place) -> None:
    before = place.replicas()
    assert place.endpoint.ask("added").status == 404
    place.become(configured(model(OTHER), model("added")))
    assert place.endpoint.ask("added").status == 200
    after = place.replicas()
    assert len(after.pop("added")) == 1
    assert after == before
    assert [card["id"] for card in place.endpoint.get("/v1/models").json()["data"]] == [STEADY, OTHER, "added"]


@pytest.mark.long
def test_a_model_taken_out_finishes_what_runs_and_refuses_the_rest_by_name(place: Place) -> None:
    """Its engine stands still until the change has arrived, however long that takes on this machine."""

    def reported() -> float:
        return place.endpoint.figure("serve_app_engine_generated_tokens_total", model=OTHER) or 0.0

    before = reported()
    streams = [place.endpoint.asking(OTHER, LONG, stream=True) for _ in range(SLOTS)]
    wait_until(
        lambda: place.endpoint.figure("serve_app_slots", model=OTHER, state="granted") == SLOTS,
        CHANGED_S,
        "all slots taken",
    )
    # a request without a first frame would be taken for one still on its way, and told that its model is gone
    wait_until(lambda: reported() >= before + 4 * SLOTS, CHANGED_S, "all have begun")
    with place.paused(OTHER):
        waiting = [place.endpoint.asking(OTHER, 3, stream=number == 1) for number in range(2)]
        wait_until(lambda: place.endpoint.figure("serve_app_waiting", model=OTHER) == 2, CHANGED_S, "two wait")
        place.declare(configured())
        for answer in [one.answer() for one in waiting]:
            reported = json.loads(answer.text)["error"]
            assert (answer.status, reported["code"], reported["param"]) == (404, "model_not_found", "model")
            assert repr(OTHER) in reported["message"]
        assert place.endpoint.ask(OTHER).status == 404
        assert all(one.is_alive() for one in streams)
    for answer in [one.answer() for one in streams]:
        assert answer.whole
        assert answer.text.count('"finish_reason":null') == LONG
    place.wait_running(configured())
    assert [card["id"] for card in place.endpoint.get("/v1/models").json()["data"]] == [STEADY]
    for metric in ("serve_app_slots", "serve_app_waiting", "serve_app_engine_steps_total", "serve_app_ejected"):
        assert place.endpoint.figure(metric, model=OTHER) is None
        assert place.endpoint.figure(metric, model=STEADY) is not None


@pytest.mark.long
def test_a_changed_model_is_replaced_and_what_runs_there_finishes(place: Place) -> None:
    before = place.replicas()
    stream = place.endpoint.asking(OTHER, LONG, stream=True)
    wait_until(
        lambda: place.endpoint.figure("serve_app_slots", model=OTHER, state="granted") == 1, CHANGED_S, "it runs"
    )
    with place.paused(OTHER):
        place.declare(configured(model(OTHER, max_num_seqs=SLOTS + 1)))
        asked = [place.endpoint.asking(OTHER) for _ in range(5)]  # for the old replica, the new one, or in between
        place.wait(lambda state: running(state, [OTHER]).get(OTHER) not in (None, [], before[OTHER]), "a new replica")
        assert stream.is_alive()
    assert stream.answer().whole
    assert [one.answer().status for one in asked] == [200] * 5
    place.wait_running(BASE)
    after = place.replicas()
    assert after[STEADY] == before[STEADY]
    assert len(after[OTHER]) == 1
    assert after[OTHER] != before[OTHER]
    assert place.endpoint.ask(OTHER, n=SLOTS + 1).status == 200
    wait_until(
        lambda: place.endpoint.figure("serve_app_slots", model=OTHER, state="total") == SLOTS + 1,
        CHANGED_S,
        "its new slots",
    )


@pytest.mark.long
def test_with_room_for_it_the_new_replica_comes_before_the_old_one_leaves(place: Place) -> None:
    roomy = {"max_surge_percent": 100}
    place.become(configured(model(OTHER, replicas=roomy)))
    (before,) = place.replicas(OTHER)[OTHER]
    changed = configured(model(OTHER, replicas=roomy, generation=1))
    place.declare(changed)
    seen: list[list[str]] = []

    def replaced(state: dict[str, Any]) -> bool:
        if not state["models"]:
            return False  # Serve tells nothing of an application that it is building
        seen.append(running(state)[OTHER])
        return before not in seen[-1] and state["state"] == "running"

    place.wait(replaced, "the old replica is gone")
    assert all(seen)  # at no moment none
    assert place.endpoint.ask(OTHER).status == 200


@pytest.mark.long
def test_keys_are_taken_over_without_a_restart(place: Place) -> None:
    before = place.replicas()
    keys = [{"key": KEY}, {"key": NEW_KEY, "tenant": "another", "max_class": "low", "default_class": "low"}]
    assert place.endpoint.get("/health", NEW_KEY).status_code == 401
    place.become(configured(model(OTHER), auth={"keys": keys}))
    assert place.endpoint.ask(OTHER, key=NEW_KEY).status == 200
    assert place.endpoint.ask(OTHER, key=NEW_KEY, priority="high").status == 403
    place.become(BASE)
    assert place.endpoint.get("/health", NEW_KEY).status_code == 401
    assert place.replicas() == before


@pytest.mark.long
def test_bounds_of_the_queue_and_of_requests_are_taken_over_without_a_restart(place: Place) -> None:
    before = place.replicas()
    assert place.endpoint.ask(OTHER, n=SLOTS).status == 200
    place.become(configured(model(OTHER), admission={"max_queued": 1}, http={"max_sequences": 1}))
    assert place.endpoint.ask(OTHER, n=SLOTS).status == 400
    asked = [place.endpoint.asking(OTHER, 3 * LONG) for _ in range(SLOTS)]
    # first, since one that is on its way to a free slot counts as waiting
    wait_until(
        lambda: place.endpoint.figure("serve_app_engine_running_sequences", model=OTHER) == SLOTS,
        CHANGED_S,
        "all slots run",
    )
    asked += [place.endpoint.asking(OTHER, LONG) for _ in range(4)]
    answers = [one.answer() for one in asked]
    assert sorted(one.status for one in answers) == [200] * (SLOTS + 1) + [429] * 3
    assert place.replicas() == before


@pytest.mark.long
def test_scaling_bounds_change_without_a_restart(place: Place) -> None:
    before = place.replicas()
    place.become(configured(model(OTHER, replicas={"min_replicas": 2, "max_replicas": 2}, drain_s=30.0)))
    after = place.replicas()
    assert len(after[OTHER]) == 2
    assert set(before[OTHER]) < set(after[OTHER])
    bounds = {"min_replicas": 1, "max_replicas": 3, "downscale_delay_s": NEVER}
    place.become(configured(model(OTHER, replicas=bounds)))  # from a number to a range: a policy scales from here on
    assert place.replicas()[OTHER] == after[OTHER]


def test_a_name_changes_its_target_without_a_restart_and_a_killed_target_fails_nothing(place: Place) -> None:
    """With the steady model as the fallback: what has begun on the killed engine continues on the next one."""

    def named(target: str) -> dict[str, Any]:
        return {"name": "chat", "targets": [{"model": target}], "fallbacks": [STEADY]}

    def ended(model_name: str, metric: str = "serve_app_named_requests_total", **labels: str) -> float:
        return place.endpoint.figure(metric, name="chat", model=model_name, **labels) or 0.0

    before = place.replicas()
    place.become(configured(model(OTHER), routes=[named(OTHER)]))
    wait_until(lambda: place.endpoint.serves("chat"), CHANGED_S, "the name answers")
    names = Load(place.endpoint, "chat")
    try:
        wait_until(lambda: ended(OTHER) > 4, CHANGED_S, "the target answers")
        os.kill(place.process(deployment_of(OTHER)), signal.SIGKILL)
        wait_until(lambda: ended(STEADY, outcome="ok") > 4, CHANGED_S, "the fallback answers")
        place.wait_running(configured(model(OTHER)))
        back = ended(OTHER)
        wait_until(lambda: ended(OTHER) > back, CHANGED_S, "the target answers again")
        place.become(configured(model(OTHER), routes=[named(STEADY)]))
        moved = ended(STEADY)
        wait_until(lambda: ended(STEADY) > moved + 4, CHANGED_S, "the new target answers")
    finally:
        names.stop()
    assert names.failed == []
    assert ended(OTHER, "serve_app_named_hops_total") > 0
    assert place.replicas(STEADY, "Router") == {one: before[one] for one in (STEADY, "Router")}
    answer = json.loads(place.endpoint.ask("chat").text)
    assert answer["model"] == "chat"


def test_the_tutorial_of_a_canary(place: Place) -> None:
    """docs/tutorials/canary.md with simulated engines: its file, its comparison, and the weights that move the rest."""
    page = CANARY.read_text()
    (file,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    written = yaml.safe_load(file)
    old, new = (one["name"] for one in written["models"])
    models = [model(old), model(new)]
    place.begin(configured(*models, routes=written["routes"]))
    ran = Counter(place.endpoint.ran("chat", f"session-{number}") for number in range(SESSIONS))
    assert ran.keys() == {old, new}
    assert ran[old] > ran[new]
    command_line = shlex.split(re.findall(r"^serve-app (compare .*)$", page, re.MULTILINE)[0])
    where = ("--url", f"{place.cluster.url}/v1", "--key", KEY, "--json")
    line = [sys.executable, "-m", "serve_app.cli", *command_line, *where]
    done = subprocess.run(line, env=laptop(), capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["model"]: row for row in json.loads(done.stdout)["models"]}
    assert {name: row["requests"] for name, row in rows.items()} == ran
    assert all(row["errors"][0] == 0 and row["first_token_s"][0] > 0 for row in rows.values())
    for target, weight in zip(written["routes"][0]["targets"], (0, 100), strict=True):
        target["weight"] = weight
    place.become(configured(*models, routes=written["routes"]))
    assert {place.endpoint.ran("chat", f"session-{number}") for number in range(SESSIONS)} == {new}


@pytest.mark.long
def test_a_replica_is_drained_by_http_and_its_requests_go_on(place: Place) -> None:
    """With URL and key alone, as from a laptop; Serve starts another replica in its place."""
    pair = configured(model(OTHER, replicas={"min_replicas": 2, "max_replicas": 2}, drain_s=30.0))
    place.become(pair)
    leaving, staying = place.replicas()[OTHER]
    asked = [place.endpoint.asking(OTHER, LONG) for _ in range(4)]
    where = ("--url", f"{place.cluster.url}/v1", "--key", KEY)
    line = [sys.executable, "-m", "serve_app.cli", "drain", leaving, "--within", "1s", "--json", *where]
    done = subprocess.run(line, env=laptop(), capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["target"] == leaving
    line = [sys.executable, "-m", "serve_app.cli", "audit", "--since", "1h", "--json", *where]
    listed = subprocess.run(line, env=laptop(), capture_output=True, text=True, timeout=COMMAND_S, check=True).stdout
    entries = [json.loads(one) for one in listed.splitlines()]
    assert [one["author"] == "machine" for one in entries if one["target"] == leaving] == [False], "once, with the key"
    assert [(one["replica"], one["ended"], one["running"]) for one in found["rows"]] == [(leaving, True, 0)]
    assert [one.answer().status for one in asked] == [200] * 4
    place.wait_running(pair)
    after = place.replicas()[OTHER]
    assert (staying in after, leaving in after) == (True, False)


def laptop() -> dict[str, str]:
    """The environment of a machine where nothing of the instance is."""
    return {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}


@pytest.mark.long
def test_batching_is_taken_over_without_a_restart_and_the_metrics_show_it(place: Place) -> None:
    before = place.replicas()
    place.become(configured(model(OTHER, batching="dynamic-32")))
    asked = [place.endpoint.asking(OTHER, 2 + 20 * number) for number in range(2 * SLOTS)]
    assert [one.answer().status for one in asked] == [200] * (2 * SLOTS)

    def reported(figure: str) -> float:
        return place.endpoint.figure(f"serve_app_engine_{figure}", model=OTHER) or 0.0

    assert reported("batched_requests_total") == 2 * SLOTS
    assert 1.0 <= reported("batch_size") <= SLOTS  # no more are granted at once, and so each batch waits in vain for 32
    assert reported("batch_wait_seconds") > 0.0
    assert 0.0 <= reported("padding_ratio") < 1.0
    assert reported("tokens_per_second") > 0.0
    assert place.replicas() == before


@pytest.mark.long
def test_a_broken_model_takes_nothing_from_the_others(place: Place) -> None:
    before = place.replicas()
    place.declare(configured(model(OTHER), BROKEN))
    state = place.wait(lambda state: state["state"] == "failed", "the broken model is given up")
    assert f"{deployment_of('broken')}: " in state["message"]
    assert "kv_cache_tokens" in state["message"]
    assert running(state) == {**before, "broken": []}
    ready = place.endpoint.get("/ready")
    assert (ready.status_code, ready.json()["without_replica"]) == (200, ["broken"])
    assert place.endpoint.ask(OTHER).status == 200
    place.become(configured(model(OTHER), model("broken")))
    assert place.endpoint.ask("broken").status == 200


@pytest.mark.long
def test_the_same_configuration_again_does_nothing(place: Place) -> None:
    before = place.replicas()
    place.become(BASE)
    assert place.replicas() == before


@pytest.mark.long
def test_of_changes_that_overtake_each_other_the_last_one_counts(place: Place) -> None:
    before = place.replicas()
    for name in ("first", "second", "third"):
        place.declare(configured(model(OTHER), model(name)))
    place.wait_running(configured(model(OTHER), model("third")))
    assert place.endpoint.ask("third").status == 200
    assert place.endpoint.ask("first").status == 404
    assert {name: ids for name, ids in place.replicas().items() if name != "third"} == before


@pytest.mark.long
def test_a_controller_that_dies_forgets_no_change_and_restarts_nothing(place: Place) -> None:
    changed = configured(model(OTHER, generation=7), model("added"), admission={"max_queued": 5})
    place.become(changed)
    before = place.replicas()
    place.kill_controller()
    place.wait_running(changed)
    assert place.replicas() == before
    place.become(configured(model(OTHER, generation=7)))  # and it goes on changing what it is told
    assert place.endpoint.ask("added").status == 404
    after = place.replicas()
    assert after == {name: ids for name, ids in before.items() if name != "added"}


@pytest.mark.long
def test_an_engine_that_loads_while_the_controller_dies_goes_on_loading(place: Place) -> None:
    place.declare(configured(model(OTHER), model("loads", simulated={"start_s": LOADING_S})))
    wait_until(lambda: place.loading("loads"), CHANGED_S, "it loads")
    before = place.loading("loads")
    place.kill_controller()
    place.wait_serving("loads")
    assert place.processes(deployment_of("loads")) == before


@pytest.mark.long
def test_a_model_taken_out_and_put_back_at_once_goes_on_when_its_former_self_ends(place: Place) -> None:
    """What the former one still runs outlives the change; when that is over, nothing of the new one may end with it."""
    (before,) = place.replicas(OTHER)[OTHER]
    with place.endpoint.streaming(OTHER, ENDLESS) as lines:
        next(lines)
        place.declare(configured())
        wait_until(lambda: place.endpoint.ask(OTHER).status == 404, CHANGED_S, "it is taken out")
        place.declare(BASE)
        wait_until(lambda: place.endpoint.ask(OTHER).status == 200, CHANGED_S, "it is back")
        assert next(lines).startswith(b"data: {")
    place.wait_running(BASE)
    (after,) = place.replicas(OTHER)[OTHER]
    assert after != before
    os.kill(place.process(deployment_of(OTHER)), signal.SIGKILL)
    wait_until(lambda: place.replicas(OTHER)[OTHER] not in ([], [after]), CHANGED_S, "another replica")
    assert place.endpoint.ask(OTHER).status == 200


@pytest.mark.long
def test_a_configuration_that_serve_cannot_build_is_taken_back(place: Place) -> None:
    """Where the cluster's release of ours knows less than the one here; the check here has let it pass."""
    before = place.replicas()
    entry = application(parse(BASE).without_secrets())
    entry["args"]["models"][1]["unheard_of"] = True
    remote = RemoteDriver(
        {
            "do": "declare",
            "environment": place.cluster.environment(),
            "application": entry,
            "serve": place.options,
            "wait": True,
            "roll_back": True,
            "models": [],
        }
    )
    try:
        reported = remote.event(patient(COMMAND_S))
    finally:
        remote.close()
    assert reported is not None
    assert reported["event"] == "error"
    assert "models.1.unheard_of: unknown key; the previous declaration is declared again" in reported["message"]
    place.wait_running(BASE)
    assert place.replicas() == before


@pytest.mark.long
def test_serve_app_deploy_changes_the_running_instance(place: Place, tmp_path: Path) -> None:
    before = place.replicas()
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(configured(model(OTHER), model("added"))))
    done = command(place, "deploy", "--config", str(file))
    assert done.returncode == 0, done.stderr
    assert "running" in done.stdout
    assert "added 1/1" in done.stdout
    assert place.endpoint.ask("added").status == 200
    assert {name: ids for name, ids in place.replicas().items() if name != "added"} == before
    file.write_text(yaml.safe_dump({**configured(), "modles": []}))
    wrong = command(place, "deploy", "--config", str(file))
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.endswith(f"error: modles: unknown key\n  -> did you mean models?\n{file}: 1 error\n")


@pytest.mark.long  # in parts: cli/test_deploy.py, cluster/local/test_wait_reasons.py, and the next test
def test_what_has_no_place_holds_up_no_deploy_and_goes_with_its_load(place: Place, tmp_path: Path) -> None:
    wide = model("wide", cpus_per_rank=4, replicas=QUICK)  # there is a place for one
    huge = model("huge", cpus_per_rank=LOGICAL_CPUS + 1)  # and none
    place.become(configured(model(OTHER), wide))
    before = place.replicas()
    file = tmp_path / "my.yaml"
    with place.endpoint.streaming("wide", ENDLESS), place.endpoint.streaming("wide", ENDLESS):
        place.declare(configured(model(OTHER), wide, huge))
        message = place.wait(lambda state: state["message"].count("1 replica waits") == 2, "both wait")["message"]
        assert "s for 4 CPUs on one node, which are not free: 3 of 8 CPUs on 127.0.0.1" in message
        assert "s for 9 CPUs on one node, and no node has that; the largest has 8 CPUs" in message
        file.write_text(yaml.safe_dump(configured(model(OTHER, generation=1), wide, huge)))
        refused = command(place, "deploy", "--config", str(file))
        assert (refused.returncode, "error: models.3.cpus_per_rank" in refused.stderr) == (2, True), refused.stderr
        done = command(place, "deploy", "--config", str(file), "--no-check")
        assert (done.returncode, done.stderr) == (0, "")
        assert "not waited for: engine-huge (updating)" in done.stdout
        after = place.replicas()
        assert after.pop(OTHER) != before.pop(OTHER)
        assert {**after, "huge": []} == {**before, "huge": []}
    place.wait(lambda state: sizes(state)["wide"] == (1, 1), "the second replica is called off, and gone")
    place.become(configured(model(OTHER, generation=1), wide))  # without the one that never had a place


@pytest.mark.long
def test_a_deploy_ends_under_a_load_that_wants_more_replicas_than_have_a_place(place: Place, tmp_path: Path) -> None:
    wide = model("wide", cpus_per_rank=4, replicas=QUICK, drain_s=2)  # there is a place for one
    place.become(configured(model(OTHER), wide))
    before = place.replicas("wide")
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(configured(model(OTHER), wide | {"generation": 1})))
    with place.endpoint.streaming("wide", ENDLESS), place.endpoint.streaming("wide", ENDLESS):
        place.wait(lambda state: "1 replica waits" in state["message"], "a second one waits")
        done = command(place, "deploy", "--config", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert "! engine-wide (2 replicas): restarted" in done.stdout
    after = place.replicas("wide")["wide"]
    assert after
    assert not set(after) & set(before["wide"])


@pytest.mark.long
def test_a_router_that_starts_later_has_the_present_configuration(started: Place, load: Load) -> None:
    """The last of this module: what is on its way through a router that is killed is lost."""
    load.stop()
    keys = {"keys": [{"key": NEW_KEY}]}
    started.become({**configured(model("added")), "auth": keys})
    before = started.replicas("Router")
    os.kill(started.process("Router"), signal.SIGKILL)
    started.wait(lambda state: running(state)["Router"] not in ([], before["Router"]), "another router")
    wait_until(lambda: started.endpoint.get("/ready", NEW_KEY).status_code == 200, CHANGED_S, "the endpoint is back")
    assert started.endpoint.get("/health").status_code == 401
    assert started.endpoint.ask("added", key=NEW_KEY).status == 200
    assert started.endpoint.ask(OTHER, key=NEW_KEY).status == 404


def command(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`serve-app` on this instance."""
    name = place.cluster.instance.name
    folder = place.cluster.state.folder.parent
    line = [sys.executable, "-m", "serve_app.cli", *arguments, "--instance", name, "--state-dir", str(folder)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return subprocess.run(
        line,
        env=environment | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=patient(COMMAND_S),
        check=False,
    )
