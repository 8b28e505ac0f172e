"""What a scrape asks of Serve's controller and the nodes' proxies: the last scaling decisions, and HAProxy's metrics.

Serve has no method for either, so a function of ours runs inside the asked actor (Ray's `__ray_call__`). In the
controller it reads two attributes; in a proxy it reads a unix socket, which takes some milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

from ray.exceptions import RayError

from autoscaling.operations.serve_controller import answer_of, serve_client
from serve_app.names import APPLICATION
from serve_app.system import exposition_here

FALLBACK = "fallback-"  # before the node's id, of the head's second proxy: it answers while HAProxy knows no router
SCRAPED = ("cause", "wanted", "target")  # of a decision's state (`autoscaling.ray_policy`)
ALSO = ("policy", "reason", "advised", "advice", "signals")  # the same, where there is one


def decisions_here(controller: Any) -> dict[str, dict[str, Any]]:
    """The last decision of our scaling policy by deployment; runs inside Serve's controller, whose state is private
    (read in Ray 2.60.0). Raises AttributeError: Serve has changed."""
    application = controller.autoscaling_state_manager._app_autoscaling_states.get(APPLICATION)
    states: Mapping[Any, Mapping[str, Any]] = (application and application._policy_state) or {}
    return {
        deployment.name: {name: state[name] for name in (*SCRAPED, *ALSO) if name in state}
        for deployment, state in states.items()
        if state.keys() >= set(SCRAPED)
    }


def scaling_decisions(within_s: float) -> dict[str, dict[str, Any]]:
    """`cause`, `wanted`, `target`, `policy`, `reason` and `signals` (what the policy saw) by deployment that follows
    its load, as the controller has them. With a second policy also `advised`, its number, and `advice`, its reason.

    Raises RayError, RayServeException, TimeoutError."""
    asked = serve_client()._controller.__ray_call__.remote(decisions_here)
    return answer_of(asked, within_s)  # type: ignore[no-any-return]


def haproxy_expositions(within_s: float) -> dict[str, str | None]:
    """By node with a HAProxy, what its exporter says; None: it does not answer. Raises as `scaling_decisions`, if the
    nodes are not known."""
    until = time.monotonic() + within_s
    proxies = answer_of(serve_client()._controller.get_proxies.remote(), within_s)
    asked = {
        node: proxy.__ray_call__.remote(exposition_here).future()
        for node, proxy in proxies.items()
        if not node.startswith(FALLBACK)
    }
    wait(asked.values(), max(0.0, until - time.monotonic()))
    return answered(asked)


def answered(asked: Mapping[str, Future[str | None]]) -> dict[str, str | None]:
    """By node, what its proxy has answered; None: nothing. A node without a HAProxy is missing."""
    found: dict[str, str | None] = {}
    for node, answer in asked.items():
        try:
            text = answer.result(0)
        except (RayError, TimeoutError):
            found[node] = None
        else:
            if text is not None:
                found[node] = text
    return found
