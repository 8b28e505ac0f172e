"""The commands of `deploy/node.sh` on a machine of a cluster with the project installed.

    start ray start ...   start Ray with the project's environment under a supervisor; returns when the node is up,
                          with `--block` when it has ended: a container's process. SIGTERM then ends it in order: a
                          worker's replicas first move or finish
    stop                  end the node; on a head: first all other nodes of the cluster
    ray ...               any Ray command, with the cluster's address and token; `ray stop` is the `stop` above
    serve-app ...         the same for serve-app; the configuration of `deploy` is stored for a restart of the head
    token                 make the cluster's token if there is none

Invariant: after `start` this machine has exactly one node of this project, or none and an error message.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serve_app.cluster.local import TOKEN_BYTES, ask, write_private
from serve_app.cluster.node.node_record import NodeFolder, NodeRecord
from serve_app.cluster.node.supervisor import LEFTOVER_GRACE_S, LOOK_S, STOP_GRACE_S, driver_environment
from serve_app.errors import ConfigError, ServeAppError, Unavailable
from serve_app.names import RECORDS_FOLDER
from serve_app.system import ask_to_end, await_start, end_marked, environment, spawn

GCS_PORT = 6379  # Ray's default
NODE_START_S = 240.0  # 3 s on an idle machine; a cold disk and a loaded machine take a minute, and Ray a second try
SUPERVISOR_STOP_S = STOP_GRACE_S + 15.0  # above the supervisor's own bounds
RELEASE_S = 20.0  # a driver connects in 3 s; a dead GCS must not delay the end of a head
DRAIN_S = 24 * 3600.0  # whoever sent SIGTERM ends this earlier: Kubernetes' terminationGracePeriodSeconds
USAGE = "usage: node.sh setup [cpu|gpu] | start ray start ... [--block] | stop | ray ... | serve-app ... | token"


@dataclass(frozen=True, slots=True)
class StartOrder:
    """A requested `ray start`. `arguments` are complete, with the node's own address. `block`: stay until its end."""

    head: bool
    block: bool
    address: str
    ip: str
    arguments: tuple[str, ...]


def option(arguments: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`; None if it is not given."""
    for index, word in enumerate(arguments):
        if word == name:
            return arguments[index + 1] if index + 1 < len(arguments) else None
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def parse(words: Sequence[str], own_address: Callable[[str], str] = environment.outgoing_address) -> StartOrder:
    """`ray start ...` as an order.

    Args:
        own_address: returns this machine's address on the route to a host.

    Raises:
        ConfigError: it is not `ray start`, or has an option that conflicts with the supervisor.
    """
    if list(words[:2]) != ["ray", "start"]:
        raise ConfigError(f"start: `ray start ...` is required, found {' '.join(words[:2])!r}", param="start")
    arguments = [word for word in words[2:] if word != "--block"]
    head = "--head" in arguments
    address = option(arguments, "--address")
    if head == (address is not None):
        raise ConfigError("start: give --head or --address=HOST:PORT", param="start")
    ip = option(arguments, "--node-ip-address")
    if ip is None:
        ip = own_address(environment.ANYWHERE if address is None else address.rpartition(":")[0])
        arguments.append(f"--node-ip-address={ip}")
    if option(arguments, "--object-store-memory") is None:
        arguments.append(f"--object-store-memory={environment.OBJECT_STORE_BYTES}")
    if address is None:
        address = f"{ip}:{option(arguments, '--port') or GCS_PORT}"
    return StartOrder(head, "--block" in words, address, ip, tuple(arguments))


def token_file() -> Path:
    """The path where Ray looks for the cluster's token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def required_token(file: Path) -> Path:
    """The file, with mode 0600 (Ray's own `get-auth-token --generate` makes it readable by all).

    Raises:
        ConfigError: there is no file.
    """
    if not file.is_file() or not file.read_text().strip():
        raise ConfigError(
            f"{file}: no token; make one where you run `ray up` (deploy/node.sh token), and copy it by file_mounts",
            param="token",
        )
    file.chmod(0o600)
    return file


def make_token() -> int:
    """Make the cluster's token if there is none; mode 0600."""
    file = token_file()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(file, secrets.token_hex(TOKEN_BYTES))
    required_token(file)
    print(f"the cluster's token is in {file}")
    return 0


def start(words: Sequence[str]) -> int:
    """Start Ray on this machine, replacing the node of an earlier `start`.

    Raises:
        ConfigError: the order is wrong, or there is no token.
        Unavailable: Ray did not start, with the end of its log.
    """
    order = parse(words)
    token = required_token(token_file())
    folder = NodeFolder()
    stop_requested = threading.Event()
    if order.block:  # from the first moment: the first process of a container has no default action for a signal
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop_requested.set())
    with folder.locked():
        end(folder)
        run_dir = environment.new_run_dir(environment.RUN_DIR)
        mark = f"machine-{secrets.token_hex(8)}"
        try:
            environ = environment.machine_environment(
                {RECORDS_FOLDER: str(folder.path / "records")} | dict(os.environ),
                mark=mark,
                token_file=token,
                run_dir=run_dir,
                ip=order.ip,
            )
        except ServeAppError:
            shutil.rmtree(run_dir)
            raise
        folder.write(NodeRecord(mark, order.head, order.address, str(run_dir), order.arguments))
        module = "serve_app.cluster.node.supervisor"
        # in a folder without Python modules
        keeper = spawn(module, str(folder.path), log=folder.log, stdin=subprocess.DEVNULL, env=environ, cwd=run_dir)
        try:
            await_start(keeper, folder.running_node, folder.log, NODE_START_S)
        except Unavailable:
            if keeper.poll() is None:
                end(folder)
            raise
    print(f"this machine is a node of {order.address}; the log of its supervisor is {folder.log}", flush=True)
    if not order.block:
        return 0
    while keeper.poll() is None:
        if stop_requested.wait(LOOK_S):
            if not order.head:
                _drain(order)
            with folder.locked():
                end(folder)
            return 0
    print(folder.log.read_text(errors="replace"), end="", flush=True)
    return keeper.returncode


def _drain(order: StartOrder) -> None:
    """Let the replicas of this worker move or finish."""
    print("draining: its replicas move to other nodes, or end with their requests", flush=True)
    question = {"do": "drain", "environment": environment.client_environment(order.address, token_file())}
    try:
        answer = ask(question | {"ip": order.ip}, DRAIN_S)
    except ServeAppError as error:
        answer = {"error": error.message}
    if "target" in answer:
        print("drained", flush=True)
    else:
        print(f"not drained: {answer.get('error', 'no answer')}", flush=True)


def end(folder: NodeFolder) -> None:
    """End the supervised node, and the processes that an unsupervised one left. The caller holds the lock."""
    node = folder.node()
    if node is not None:
        ask_to_end(node.keeper_pid, node.keeper_ticks, SUPERVISOR_STOP_S)
        end_marked(node.mark, LEFTOVER_GRACE_S)
        shutil.rmtree(node.run_dir, ignore_errors=True)
        folder.forget(node.mark)


def stop() -> int:
    """End the node of this machine; on a head, first the other nodes, which nothing else ends."""
    folder = NodeFolder()
    with folder.locked():
        node = folder.node()
        if node is None:
            print("no node of serve-app runs here")
            return 0
        if node.head:
            folder.forget_application()
            if node.state == "up":
                _release_others(node)
        end(folder)
    print("the node has ended")
    return 0


def _release_others(node: NodeRecord) -> None:
    """Ask the GCS to end all other nodes. A node that misses it ends by itself, a minute after the GCS's end."""
    order = {"do": "release", "environment": environment.client_environment(node.address, token_file())}
    try:
        released = ask(order, RELEASE_S)
    except ServeAppError as error:
        print(f"the other nodes could not be asked to end, and end by themselves in a minute: {error.message}")
    else:
        print(f"asked to end: {', '.join(released.get('nodes', ())) or 'no other node'}")


def client_environ(folder: NodeFolder) -> dict[str, str]:
    """This process's environment with the cluster's address and token.

    Raises:
        Unavailable: no node runs here.
    """
    node = folder.node()
    if node is None:
        raise Unavailable("no node of serve-app runs here", code="not_running")
    return driver_environment(node.address, token_file())


def ray(arguments: Sequence[str]) -> int:
    """Run a Ray command. `ray stop` ends the supervised node; without one, it ends any Ray on this machine."""
    folder = NodeFolder()
    here = folder.node() is not None
    if here and arguments[:1] == ["stop"]:
        return stop()
    return _run(["ray.scripts.scripts", *arguments], client_environ(folder) if here else os.environ)


def serve_app(arguments: Sequence[str]) -> int:
    """Run a `serve-app` command. A deployed configuration is recorded, for a restart of the head."""
    folder = NodeFolder()
    status = _run(["serve_app.cli", *arguments], client_environ(folder))
    config = option(arguments, "--config")
    if status == 0 and arguments[:1] == ["deploy"] and config is not None:
        folder.remember_application(Path(config))
    return status


def _run(module_and_arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    # -P: ignore a folder of the same name in the current directory
    return subprocess.run([sys.executable, "-P", "-m", *module_and_arguments], env=environ, check=False).returncode


def main(words: Sequence[str]) -> int:
    """Run one command. Returns the exit status: 1 for a failure, 2 for wrong arguments."""
    try:
        match list(words):
            case ["start", *rest]:
                return start(rest)
            case ["stop", *_]:
                return stop()
            case ["ray", *rest]:
                return ray(rest)
            case ["serve-app", *rest]:
                return serve_app(rest)
            case ["token", *_]:
                return make_token()
        print(USAGE, file=sys.stderr)
        return 2
    except ServeAppError as error:
        print(f"node.sh: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
