"""The record that a machine of a cluster keeps of its node.

    <state folder>/machine-<host name>/     0700; by host name, since machines may share home folders
    ├── lock            held by the command that starts or ends the node
    ├── machine.json    while the node is supervised
    ├── application     the path of the last deployed configuration; a restarted head deploys it again
    └── keeper.log      of the supervisor and of `ray start`

Invariant: only the user can read these files, and a file is either the old or the new one, never partly written.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock
from pydantic import TypeAdapter

from serve_app.cluster.local import make_private, read_text, state_root, write_private

State = Literal["starting", "up", "failed", "restarting"]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A supervised node. `arguments`: of `ray start`; `address`: of the cluster, host:port."""

    mark: str
    head: bool
    address: str
    run_dir: str
    arguments: tuple[str, ...]
    state: State = "starting"
    keeper_pid: int = 0
    keeper_ticks: int | None = None
    restarts: int = 0


NODE_RECORD = TypeAdapter(NodeRecord)


class NodeFolder:
    """Reads and writes the folder above."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or state_root() / f"machine-{socket.gethostname()}"
        self.log = self.path / "keeper.log"
        self._record = self.path / "machine.json"
        self._application = self.path / "application"

    def locked(self) -> FileLock:
        """Make the folder and lock it: one command at a time starts or ends the node; another one waits."""
        make_private(self.path)
        return FileLock(self.path / "lock")

    def node(self) -> NodeRecord | None:
        """The node that is supervised, or did not end in order; None if there is none."""
        text = read_text(self._record)
        return None if text is None else NODE_RECORD.validate_json(text)

    def running_node(self) -> NodeRecord | None:
        node = self.node()
        return node if node is not None and node.state == "up" else None

    def write(self, node: NodeRecord) -> None:
        write_private(self._record, NODE_RECORD.dump_json(node, indent=1).decode())

    def forget(self, mark: str) -> None:
        """Remove the record if it still is this node's."""
        node = self.node()
        if node is not None and node.mark == mark:
            self._record.unlink()

    def application(self) -> str | None:
        """The path of the last deployed configuration."""
        return read_text(self._application)

    def remember_application(self, path: Path) -> None:
        write_private(self._application, os.fspath(path.absolute()))

    def forget_application(self) -> None:
        self._application.unlink(missing_ok=True)
