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

TOGETHER = ("tests/e2e/", "tests/cluster/")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: too slow for `make test`; `make test-long` runs it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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


class GroupScheduling(LoadScopeScheduling):
    """How `make test` shares the tests out to its processes (pytest-xdist): a group runs in one of them, in order. The
    end-to-end tests share stacks, those of a cluster start Ray with fixed ports; of other tests a file is a group."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for group in TOGETHER if nodeid.startswith(group)), nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)
