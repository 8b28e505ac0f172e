"""What the installed Serve does on a slow machine, with a node's environment and without: each in a process of its own,
since Serve reads its variables on import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve_app.system import environment
from tests.requires import requires

requires("linux")

ANSWER_S = 120.0  # of a Python that imports Serve's controller: 4 s idle
ASK = """
import json
import time
from unittest.mock import MagicMock

from ray.serve._private import constants
from ray.serve._private.common import ReplicaState
from ray.serve._private.deployment_state import DeploymentState, ReplicaStartupStatus
from ray.serve._private.proxy_state import ProxyState
from ray.serve.schema import ProxyStatus

SLOW_S = 40  # of a HAProxy on a starved machine


class Proxy:
    '''A proxy's actor as the controller sees it, once a second: ready after SLOW_S.'''

    actor_id, worker_id, log_file_path = "a", "w", "log"
    age_s = waited_s = 0

    def is_ready(self, timeout_s):
        self.age_s += 1
        self.waited_s += 1
        if self.age_s >= SLOW_S:
            return True
        if self.waited_s < timeout_s:
            return None
        self.waited_s = 0
        return False


state = ProxyState(Proxy(), "name", "node", "127.0.0.1", "instance")
while state.status == ProxyStatus.STARTING:
    state.reconcile()

starting = MagicMock(_prev_startup_warning=time.time() - 3600)  # a replica starts for an hour
starting._check_startup_replicas.side_effect = [[(MagicMock(), ReplicaStartupStatus.PENDING_INITIALIZATION)], [], []]
starting._replicas.pop.return_value = []
before = starting._curr_status_info
DeploymentState._check_and_update_transitioning_replicas(starting)
messages = [str(call) for call in before.update_message.call_args_list]
haproxy_s = constants.RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S
found = {"proxy": state.status.value, "messages": messages, "haproxy_s": haproxy_s}
print(json.dumps(found | {"check_s": constants.PROXY_HEALTH_CHECK_PERIOD_S}))
"""


def serve_with(variables: dict[str, str]) -> dict[str, Any]:
    """What Serve does in a process with these variables of its own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=own | {name: value for name, value in variables.items() if name.startswith("RAY_SERVE_")},
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("run")
    return serve_with(environment.common_environment("mark", folder))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return serve_with({})


def test_a_haproxy_that_needs_longer_than_three_checks_of_serve_is_waited_for(
    ours: dict[str, Any], plain: dict[str, Any]
) -> None:
    assert plain["proxy"] == "UNHEALTHY", "Serve by itself replaces it"
    assert ours["proxy"] == "HEALTHY"
    wanted = environment.SERVES_WAITS["RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S"]
    assert ours["haproxy_s"] == int(wanted) > plain["haproxy_s"]


def test_serves_own_message_of_a_slow_init_is_never_shown(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    (reported,) = plain["messages"]
    assert "slow __init__" in reported, "Serve by itself replaces a deployment's message"
    assert ours["messages"] == []


def test_serve_replaces_a_dead_haproxy_sooner_than_a_controller_dies_again(
    ours: dict[str, Any], plain: dict[str, Any]
) -> None:
    assert ours["check_s"] == 1.0 < plain["check_s"]
