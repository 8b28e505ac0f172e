"""What all tests share: the marker of the long ones, second attempts in CI, and which tests stay together."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

# How long an example takes says how busy the machine is: nothing is measured in a unit test.
hypothesis.settings.register_profile("ours", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("ours")

# What starts processes depends on a machine that others load, too. CI gives such a test a second attempt and names it
# in its summary (RERUN), with the first attempt's error; whoever develops gets none. Pure code never gets one.
WITH_PROCESSES = (
    "tests/e2e/",
    "tests/cluster/",
    "tests/cli/",
    "tests/client/",
    "tests/engine/",
    "tests/http/",
    "tests/quota/",
    "tests/router/",
    "tests/settings/",
    "tests/system/",
    "tests/transport/",
)
CI_RERUNS = 1

# End-to-end modules by the stack that they share, a fixture of tests/e2e/conftest.py; the others of them have one of
# their own. A module that is not named here has `stack`.
STACKS = {
    "three": (
        "actor_killed", "affinity", "explain", "handle_router_lost", "idempotency", "keys", "limits", "three_routers",
        "usage",
    ),
    "changing": ("model_changes", "quota", "sessions"),
    "": (
        "chaos", "continued_streams", "edge_deaths", "grammar_bounds", "plain_serve", "redis_streams", "scaling",
        "serve_ways", "wire_loss",
    ),
}  # fmt: skip
SHARED_STACKS = {"stack", "three", "changing"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: too slow for `make test`; `make test-long` runs it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        used = SHARED_STACKS.intersection(item.fixturenames) if isinstance(item, pytest.Function) else set()
        if used and used != {group_of(item.nodeid)}:
            raise pytest.UsageError(f"{item.nodeid} has {sorted(used)}: name its module in STACKS of tests/conftest.py")
    if os.environ.get("CI") == "true":
        for item in items:
            if item.nodeid.startswith(WITH_PROCESSES):
                item.add_marker(pytest.mark.flaky(reruns=CI_RERUNS))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have counted (`record_property("summary", ...)`), from all processes."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(str(value))


def group_of(nodeid: str) -> str:
    """What runs in one process, in order: end-to-end tests that share a stack, and the tests of a cluster, which start
    Ray with fixed ports; of other tests a file."""
    file = nodeid.partition("::")[0]
    if file.startswith("tests/cluster/"):
        return "cluster"
    if not file.startswith("tests/e2e/"):
        return file
    module = file.removeprefix("tests/e2e/test_").removesuffix(".py")
    return next((stack or file for stack, modules in STACKS.items() if module in modules), "stack")


class GroupScheduling(LoadScopeScheduling):
    """How `make test` shares the tests out to its processes (pytest-xdist). The group with the most tests goes first:
    that of the end-to-end tests' `stack`, which takes longest."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)
