"""What all tests share: their bound, the marker of the long ones, second attempts in CI, and which stay together."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterable
from pathlib import Path
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
        "plain_serve", "pooling", "quota_vllm", "redis_streams", "reverse_proxy", "sums_agree", "upgrade",
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
LANES = 3  # with so many processes the first has the stacks and the others files
FIRST = "gw0"
BETWEEN = "tests/transport/"  # its files come between two stacks
FILES_NICE = 5  # of the others: a stack that waits for the machine holds up the run, a file does not


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: too slow for `make test`; `make test-long` runs it")
    effort.pytest_configure(config)
    time_limit.pytest_configure(config)
    process, processes = process_of(config)
    if processes >= LANES and process:
        os.nice(FILES_NICE)


def process_of(config: pytest.Config) -> tuple[int, int]:
    """The number of this process among those that run tests, and how many there are."""
    worker = getattr(config, "workerinput", None)
    return (0, 1) if worker is None else (int(worker["workerid"].removeprefix("gw")), worker["workercount"])


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


def next_group(waiting: Iterable[str], last: str | None, *, files_first: bool = False) -> str | None:
    """The group that a process takes after its last one; None: there is none.

    What starts a stack takes longest and goes first, or last in a process that has `files_first`. Two with a stack
    never follow each other, where there is a file: pytest takes one down with the first test outside of tests/e2e.
    """
    groups = list(waiting)
    wants_file = files_first or (last is not None and _has_stack(last))
    wanted = [group for group in groups if _is_file(group) == wants_file]
    return next(iter(wanted or groups), None)


def _has_stack(group: str) -> bool:
    return group != "cluster" and not _is_file(group)


def _is_file(group: str) -> bool:
    """Whether the group is a file of tests that are not end to end."""
    return group.endswith(".py") and not group.startswith(END_TO_END)


def collects(process: int, processes: int, path: str) -> bool:
    """Whether a process collects this file, relative to the project.

    With three processes or more, the first has all that starts a stack, and a few files that come between two stacks.
    The second has files, and when there are none left it helps with stacks that no other group shares. The others have
    files. So there is one stack at a time while there are files: an idle one takes a sixth of two cores, and files fill
    what it leaves. To collect what another one runs would take a process a minute.
    """
    group = group_of(path)
    if processes < LANES or not path.endswith(".py"):
        return True
    if process == 0:
        return not _is_file(group) or path.startswith(BETWEEN)
    return _is_file(group) or (process == 1 and group not in SHARED_STACKS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.is_relative_to(config.rootpath / "tests"):
        return None
    return None if collects(*process_of(config), str(collection_path.relative_to(config.rootpath))) else True


class GroupScheduling(LoadScopeScheduling):
    """How `make test` shares the tests out to its processes (pytest-xdist), each of which may have collected a part.
    Of groups that `next_group` treats alike, that with the most tests goes first."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._collected: dict[WorkerController, set[str]] = {}

    def schedule(self) -> None:
        if not self._collected:
            every = self.registered_collections.values()
            nodeids = list(dict.fromkeys(nodeid for collected in every for nodeid in collected))
            self.collection = nodeids
            groups: dict[str, dict[str, bool]] = {}
            for nodeid in nodeids:
                groups.setdefault(group_of(nodeid), {})[nodeid] = False
            self.workqueue.update(sorted(groups.items(), key=lambda group: -len(group[1])))
            self._collected = {node: set(collected) for node, collected in self.registered_collections.items()}
            super().schedule()  # a process runs a test once it has the next one: each gets two groups at first
        super().schedule()

    def _assign_work_unit(self, node: WorkerController) -> None:
        own = [group for group, tests in self.workqueue.items() if self._collected[node].issuperset(tests)]
        last = next(reversed(self.assigned_work[node]), None)
        group = next_group(own, last, files_first=self.numnodes >= LANES and node.gateway.id != FIRST)
        if group is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(group, last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)
