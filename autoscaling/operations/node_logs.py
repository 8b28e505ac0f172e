"""Reads the log files and the records of all nodes: an actor on each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autoscaling.operations.event_filter import RecordAnswers
from autoscaling.operations.node_records import NodeRecords
from serve_app.system import LogFilter, LogPart, LogReader, records_folder

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

    def records(self, method: str, question: Any) -> tuple[str, Any]:
        """What a method of `NodeRecords` answers to a question, and which folder it has read."""
        found = NodeRecords(records_folder(Path(self._folder).parent))
        return found.place, getattr(found, method)(question)


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
        return answers_of([reader.find.remote(wanted, last) for reader in self._all().values()], within_s)

    def records(self, method: str, question: Any, within_s: float) -> RecordAnswers:
        """What `NodeRecords` of every node answers that does in time; nodes with one folder count once."""
        asked = {node: reader.records.remote(method, question).future() for node, reader in self._all().items()}
        wait(asked.values(), within_s)
        found: dict[str, Any] = {}
        missing = []
        for node, answer in asked.items():
            try:
                place, records = answer.result(0.0)
                found[place] = records
            except (RayError, TimeoutError, OSError):
                missing.append(node)
                with self._lock:
                    self._readers.pop(node, None)  # the next question has a new one
        return RecordAnswers(list(found.values()), missing)

    def _all(self) -> dict[str, Any]:
        """A reader on each living node."""
        alive = living_nodes()
        with self._lock:
            self._readers = {node: self._readers.get(node) or new_reader(node, LogFilter()) for node in alive}
            return dict(self._readers)

    def close(self) -> None:
        """End the readers."""
        self._readers = {}
