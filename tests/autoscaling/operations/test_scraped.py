"""What is read inside Serve's controller: the last decision of each deployment that follows its load."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from ray.exceptions import RayError
from ray.serve._private.autoscaling_state import AutoscalingStateManager
from ray.serve._private.common import DeploymentID

from autoscaling.operations import scraped
from autoscaling.ray_policy import ScalingPolicy
from serve_app.names import APPLICATION
from tests.autoscaling.fake_serve import ENGINE, FakeServe


def controller(states: Any) -> Any:
    """With Serve's own manager, in which our application has these states."""
    manager = AutoscalingStateManager()
    manager._app_autoscaling_states[APPLICATION] = SimpleNamespace(_policy_state=states)  # type: ignore[assignment]
    return SimpleNamespace(autoscaling_state_manager=manager)


def test_a_decision_of_our_policy_is_read_as_it_was_made() -> None:
    serve = FakeServe(config={"max_replicas": 3})
    serve.router_tells("r1", waiting=99, granted=0)
    _, states = ScalingPolicy(clock=serve.clock)(serve.contexts())
    deployment = DeploymentID(name=ENGINE, app_name=APPLICATION)
    found = scraped.decisions_here(controller({deployment: states[ENGINE]}))
    assert found[ENGINE].pop("reason").endswith("max_replicas is 3")
    assert found[ENGINE].pop("signals") == ""
    assert found == {ENGINE: {"policy": "ongoing", "cause": "max_replicas", "wanted": 3, "target": 1}}


@pytest.mark.parametrize("states", [None, {}, {DeploymentID(name="router"): {}}])
def test_before_the_first_decision_there_is_none(states: Any) -> None:
    assert scraped.decisions_here(controller(states)) == {}


def test_without_our_application_there_is_none() -> None:
    assert scraped.decisions_here(SimpleNamespace(autoscaling_state_manager=AutoscalingStateManager())) == {}


def test_what_runs_in_serves_processes_is_sent_by_name() -> None:
    """They import it: what is sent is short, and of their own release."""
    assert len(cloudpickle.dumps(scraped.decisions_here)) < 200
    assert len(cloudpickle.dumps(scraped.exposition_here)) < 200


def test_a_node_that_does_not_answer_is_not_taken_for_one_without_haproxy() -> None:
    asked: dict[str, Future[str | None]] = {name: Future() for name in ("answers", "has none", "fails", "is silent")}
    asked["answers"].set_result("haproxy_process_current_connections 3\n")
    asked["has none"].set_result(None)
    asked["fails"].set_exception(RayError("HAProxy stands still"))
    found = scraped.answered(asked)
    assert found == {"answers": "haproxy_process_current_connections 3\n", "fails": None, "is silent": None}


class _Asked:
    """A remote call that has this answer."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *_: Any) -> Any:
        made: Future[Any] = Future()
        made.set_result(self._answer)
        return SimpleNamespace(future=lambda: made)


def test_the_heads_second_proxy_is_not_asked_for_the_same_haproxy(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = SimpleNamespace(__ray_call__=_Asked("haproxy_process_current_connections 3\n"))
    controller = SimpleNamespace(get_proxies=_Asked({"node-1": proxy, "fallback-node-1": proxy}))
    monkeypatch.setattr(scraped, "serve_client", lambda: SimpleNamespace(_controller=controller))
    assert scraped.haproxy_expositions(1.0).keys() == {"node-1"}
