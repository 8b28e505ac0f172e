"""What all tests share: the marker of the long ones, second attempts in CI, and which tests stay together."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadGroupScheduling

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

# fixtures of tests/e2e/conftest.py, which live until the package's last test
SHARED_STACKS = ("changing", "three", "stack")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: too slow for `make test`; `make test-long` runs it")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for group, together in groups(items).items():
        for item in together:
            item.add_marker(pytest.mark.xdist_group(group))
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


def groups(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """What `make test` runs in one process, in order: the files that use a stack which others use, too; and the tests
    of a cluster, which start Ray with fixed ports. End-to-end tests with a stack of their own are free to run beside.
    """
    uses = {item.path: stack for stack in SHARED_STACKS for item in items if stack in fixtures_of(item)}
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        group = "cluster" if item.nodeid.startswith("tests/cluster/") else uses.get(item.path)
        if group is not None:
            found.setdefault(group, []).append(item)
    return found


def fixtures_of(item: pytest.Item) -> list[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else []


class GroupScheduling(LoadGroupScheduling):
    """How `make test` shares the tests out to its processes (pytest-xdist): by `groups`, and of other tests a file is a
    group. The group with the most tests goes first: the shared stack's, which takes longest."""

    def _split_scope(self, nodeid: str) -> str:
        group: str = super()._split_scope(nodeid)
        return group.partition("::")[0] if group == nodeid else group


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)
