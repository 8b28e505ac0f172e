"""Reads the log files of all nodes: an actor on each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.system import LogFilter, LogPart, LogReader

READ_S = 30.0  # a reader's process starts within seconds


class NodeLogs:
    """Reads the log files of its node.

    Args:
        wanted: of `read`.
    """

    def __init__(self, wanted: LogFilter) -> None:
        self._folder = ray_worker._global_node.get_logs_dir_path()  # type: ignore[attr-defined]
        self._reader = LogReader(self._folder, wanted)

    def read(self, last: int | None) -> list[LogPart]:
        """The `last` lines of each file; None: the new ones."""
        return self._reader.new() if last is None else self._reader.last(last)

    def find(self, wanted: LogFilter, last: int) -> list[LogPart]:
        """The `last` lines of each file; keeps nothing."""
        return LogReader(self._folder, wanted).last(last)


def log_readers(wanted: LogFilter) -> dict[str, Any]:
    """A reader on each living node, by the node's id."""
    return {node: new_reader(node, wanted) for node in living_nodes()}


def living_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def new_reader(node: str, wanted: LogFilter) -> Any:
    made: Any = ray.remote(NodeLogs)
    return made.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(wanted)


def answers_of(asked: Sequence[Any], within_s: float = READ_S) -> list[LogPart]:
    """What readers found; of a node that does not answer in time, nothing."""
    done, _ = wait([one.future() for one in asked], within_s)
    parts: list[LogPart] = []
    for answer in done:
        with contextlib.suppress(RayError):  # its node has left
            parts += answer.result()
    return parts


class NodeReaders:
    """Readers that are kept from one question to the next, until `close`."""

    def __init__(self) -> None:
        self._readers: dict[str, Any] = {}
        self._lock = threading.Lock()

    def find(self, wanted: LogFilter, last: int, within_s: float) -> list[LogPart]:
        """The `last` lines of each file of every node that answers in time."""
        alive = living_nodes()
        with self._lock:
            readers = {node: self._readers.get(node) or new_reader(node, LogFilter()) for node in alive}
            self._readers = readers
        return answers_of([reader.find.remote(wanted, last) for reader in readers.values()], within_s)

    def close(self) -> None:
        """End the readers."""
        self._readers = {}
