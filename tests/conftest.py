"""What all tests share: their bound, the marker of the long ones, second attempts in CI, and which stay together."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterable
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from serve_app.system.events import EventHandler
from serve_app.system.log_format import SERVE_LOGGER
from tests import effort, time_limit

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

# End-to-end modules by what they share: a stack, a fixture of tests/e2e/conftest.py, or the engine of `continuations`
# or `attacks`; the others of them have one of their own. A module that is not named here has `stack`.
STACKS = {
    "three": (
        "actor_killed", "affinity", "edge_deaths", "explain", "handle_router_lost", "idempotency", "kept_conversations",
        "keys", "limits", "records", "scaling", "three_routers", "tokens", "usage", "connection_loss",
    ),
    "changing": ("model_changes", "quota", "remote_deploy", "serve_ways", "sessions"),
    "continuations": ("continued_streams", "preemption"),
    "attacks": ("grammar_bounds", "large_requests"),
    "": (  # beside `stack` they would only wait: an idle one takes a sixth of the machine
        "backup", "chaos", "dashboards", "drills", "embeddings", "gcs_still", "handle_plain", "keys_postgres",
        "plain_serve", "pooling", "quota_vllm", "redis_streams", "reverse_proxy", "sums_agree", "thinking", "upgrade",
    ),
}  # fmt: skip
# Rules that look at all sources. One process has them, and parses each file once (tests/syntax.py).
RULES = tuple(
    f"tests/test_{name}.py"
    for name in ("house", "suite_rules", "words", "imports", "log_lines", "dependencies", "packaging")
)
SHARED_STACKS = {"stack", "three", "changing"}
END_TO_END = "tests/e2e/"
CLUSTER = "tests/cluster/"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: too slow for `make test`; `make test-long` runs it")
    effort.pytest_configure(config)
    time_limit.pytest_configure(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without Python's garbage collector, a quarter of its time: what is imported stays. Nor do later collections look
    at it: each of them would take seconds, and in a run of all tests there are dozens."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        used = SHARED_STACKS.intersection(item.fixturenames) if isinstance(item, pytest.Function) else set()
        if used and used != {group_of(item.nodeid)}:
            raise pytest.UsageError(f"{item.nodeid} has {sorted(used)}: name its module in STACKS of tests/conftest.py")
    if os.environ.get("CI") == "true":
        for item in items:
            if item.nodeid.startswith(WITH_PROCESSES):
                item.add_marker(pytest.mark.flaky(reruns=CI_RERUNS))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.nodeid.startswith((END_TO_END, CLUSTER)):
        reset_loggers()


def reset_loggers() -> None:
    """Ray's and Serve's loggers as a process has them at first.

    Another test of this process may have begun Ray (which may set a level that hides warnings) or parts of Serve here
    (which end its logger's way to the root, and keep events in a folder of their own).
    """
    logging.disable(logging.NOTSET)
    serve = logging.getLogger(SERVE_LOGGER)
    serve.setLevel(logging.NOTSET)
    serve.handlers = [one for one in serve.handlers if not isinstance(one, EventHandler)]
    ray = logging.getLogger(SERVE_LOGGER.partition(".")[0])
    ray.setLevel(logging.INFO)  # as `import ray` does
    for logger in (ray, serve):
        logger.propagate = True
        logger.disabled = False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have counted (`record_property("summary", ...)`), from all processes."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(str(value))


def group_of(nodeid: str) -> str:
    """What runs in one process, in order: end-to-end tests that share a stack; the tests of a cluster, which start Ray
    with fixed ports; all that look at sources; of other tests a file."""
    file = nodeid.partition("::")[0]
    if file in RULES:
        return RULES[0]
    if file.startswith(CLUSTER):
        return "cluster"
    if not file.startswith(END_TO_END):
        return file
    module = file.removeprefix(END_TO_END + "test_").removesuffix(".py")
    return next((stack or file for stack, modules in STACKS.items() if module in modules), "stack")


def next_group(waiting: Iterable[str], last: str | None, other_has_stack: bool = False) -> str:
    """The group that a process takes after its last one. Those that start processes take longest and go first, so that
    no process waits at the end for the last of them. Two with a stack never follow each other: pytest takes one down
    with the first test outside of tests/e2e. Nor do two run beside each other: an idle stack takes a sixth of two
    cores, and two that work would wait for each other, where a file fills what a stack leaves."""
    groups = list(waiting)
    wants_file = other_has_stack or (last is not None and _has_stack(last))
    wanted = [group for group in groups if _is_file(group) == wants_file]
    return (wanted or groups)[0]


def _has_stack(group: str) -> bool:
    return group != "cluster" and not _is_file(group)


def _is_file(group: str) -> bool:
    """Whether the group is a file of tests that are not end to end."""
    return group.endswith(".py") and not group.startswith(END_TO_END)


class GroupScheduling(LoadScopeScheduling):
    """How `make test` shares the tests out to its processes (pytest-xdist). Of groups that `next_group` treats alike,
    that with the most tests goes first."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        last = next(reversed(self.assigned_work[node]), None)
        others = [work for other, work in self.assigned_work.items() if other is not node]
        other_has_stack = any(
            not (_is_file(group) or all(done.values())) for work in others for group, done in work.items()
        )
        self.workqueue.move_to_end(next_group(self.workqueue, last, other_has_stack), last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)
