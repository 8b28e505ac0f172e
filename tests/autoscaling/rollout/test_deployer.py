"""A deployment by HTTP: checked against what runs, carried out in a thread, reported step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from autoscaling.rollout import deployer as module
from autoscaling.rollout.audit import AuditWriter
from autoscaling.rollout.deployer import Deployer, DeployOrder, prepare
from autoscaling.rollout.deployment import Order, Tell
from serve_app.errors import ConfigError, DeployConflict, Forbidden, Unavailable
from serve_app.names import APPLICATION
from serve_app.settings import application, configuration_digest, parse
from tests.fakes.router import SOON_S

RUNNING = application(parse({"models": [{"name": "a", "path": "/models/a"}]}), import_path="place:build")
GIVEN = {"models": [{"name": "a", "max_num_seqs": 3}]}


def details(entry: Mapping[str, Any] | None = RUNNING) -> dict[str, Any]:
    return {"applications": {APPLICATION: {"deployed_app_config": entry, "deployments": {}}}}


def order(**more: Any) -> DeployOrder:
    return DeployOrder("deploy_1", GIVEN, "key_1", "ci", **more)


def state(waits: dict[str, str], name: str = "updating", **more: Any) -> dict[str, Any]:
    return {"state": name, "message": "", "waits": waits, "more": {}, "unready": {}, **more}


class Carried:
    """What the deployer carries out: the script of one deployment."""

    def __init__(self, script: Callable[[Tell], None]) -> None:
        self._script = script
        self.orders: list[Order] = []
        self.audits: list[AuditWriter] = []
        self.left: Callable[[float], bool] | None = None

    def __call__(self, change: Order, audit: AuditWriter, tell: Tell, is_left: Callable[[float], bool]) -> None:
        self.orders.append(change)
        self.audits.append(audit)
        self.left = is_left
        self._script(tell)


@pytest.fixture(autouse=True)
def serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.application, "details", lambda within_s: details())


def ended(script: Callable[[Tell], None]) -> tuple[dict[str, Any], Carried]:
    """How a deployment with this script ends."""
    carried = Carried(script)
    made = Deployer("deploy_1", "key key_1", carried, end=lambda: None, now=lambda: 5.0)
    assert made.look()["state"] == "checking"
    assert made.begin(order())["state"] in ("declaring", "waiting", "done", "failed", "rolled_back", "left")
    for thread in threading.enumerate():
        if thread.name == "deployment":
            thread.join(SOON_S)
    return made.look(), carried


def test_what_is_declared_is_what_was_sent_with_what_the_machine_alone_changes() -> None:
    prepared = prepare(details(), GIVEN, "ci", on_cpu=True)
    model = prepared.entry["args"]["models"][0]
    assert (model["path"], model["max_num_seqs"]) == ("/models/a", 3)
    assert prepared.entry["import_path"] == "place:build", "the code that builds the application is the machine's"
    (engine,) = [one for one in prepared.changes if one.effect == "restarted"]
    assert engine.fields == ("max_num_seqs: 64 -> 3",)
    digests = (configuration_digest(RUNNING["args"]), configuration_digest(prepared.entry["args"]))
    assert prepared.digests == digests


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (None, "no configuration"),
        ({**RUNNING, "args": {**RUNNING["args"], "release": "0.0.1"}}, "release 0.0.1"),
        ({**RUNNING, "args": {**RUNNING["args"], "store": {"url": "${DB}"}}}, "a variable of the process"),
        ({**RUNNING, "args": {"config": "/etc/serve.yaml"}}, "cannot be read"),
    ],
)
def test_what_the_machine_declared_in_another_way_is_changed_there(entry: Any, why: str) -> None:
    with pytest.raises(DeployConflict, match=why):
        prepare(details(entry), GIVEN, "ci", on_cpu=True)


def test_a_refused_configuration_declares_nothing() -> None:
    carried = Carried(lambda tell: None)
    made = Deployer("deploy_1", "key key_1", carried, end=lambda: None)
    for given, error in (
        ({"models": [{"name": "a", "path": "/etc"}]}, Forbidden),
        ({"models": [{"name": "a", "max_num_seqs": -1}]}, ConfigError),
    ):
        with pytest.raises(error):
            made.begin(DeployOrder("deploy_1", given, "key_1", "ci"))
    assert carried.orders == []
    assert made.look()["state"] == "checking", "then the router ends it, or it ends by itself"


def test_a_deployment_is_followed_to_its_end_and_recorded_as_the_key_s() -> None:
    def run(tell: Tell) -> None:
        tell("phase", phase="declared")
        tell("status", **state({"engine-a": "updating"}))
        tell("status", **state({}, "running"))

    found, carried = ended(run)
    assert (found["state"], found["waits"], found["ended_at"]) == ("done", {}, 5.0)
    assert found["digest_before"] != found["digest_after"]
    assert found["changes"][0]["deployment"] == "engine-a"
    (change,) = carried.orders
    assert (change.models, change.roll_back, change.wait, change.serve) == (("a",), True, True, {})


def test_a_failure_and_its_roll_back_are_two_states() -> None:
    failed = state({"engine-a": "deploy_failed"}, message="no memory")
    found, _ = ended(lambda tell: tell("status", **failed))
    assert (found["state"], found["message"]) == ("failed", "no memory")
    found, _ = ended(lambda tell: tell("status", **failed, rolled_back=True))
    assert found["state"] == "rolled_back"


def test_an_error_ends_it_with_its_reason() -> None:
    def refuse(tell: Tell) -> None:
        raise Unavailable("Serve cannot build the application: no", code="deploy_failed")

    assert ended(refuse)[0]["message"] == "Serve cannot build the application: no"

    def crash(tell: Tell) -> None:
        raise RuntimeError("odd")

    found, _ = ended(crash)
    assert (found["state"], found["message"]) == ("failed", "RuntimeError: odd")


def test_what_does_not_run_in_time_is_not_followed_for_ever() -> None:
    found, carried = ended(lambda tell: tell("status", **state({"engine-a": "updating"})))
    assert (found["state"], found["ended_at"]) == ("left", 5.0)
    assert carried.left is not None
    assert not carried.left(0.0), "900 s have not passed"


def test_an_actor_that_is_not_used_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEGIN_S", 0.01)
    gone = threading.Event()
    Deployer("deploy_1", "key key_1", Carried(lambda tell: None), end=gone.set)
    assert gone.wait(SOON_S)
