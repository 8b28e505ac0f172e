"""What all tests share: the marker of the long ones, second attempts in CI, and which tests stay together."""

from __future__ import annotations

import os

import hypothesis
import pytest

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

TOGETHER = ("e2e", "cluster")  # each a group of tests that one process runs, in order


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: too slow for `make test`; `make test-long` runs it")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its group, which `make test` runs in one of its processes (pytest-xdist, `--dist loadgroup`)."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item.nodeid)))
        if os.environ.get("CI") == "true" and item.nodeid.startswith(WITH_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=CI_RERUNS))


def group_of(nodeid: str) -> str:
    """The end-to-end tests share stacks, those of a cluster start Ray with fixed ports; other files stand alone."""
    return next((group for group in TOGETHER if nodeid.startswith(f"tests/{group}/")), nodeid.partition("::")[0])
