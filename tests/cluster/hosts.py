"""Test hosts on this machine: a switch and hosts in namespaces, each with an sshd, like machines in a rack.

A host has its own network, processes, name, home folder, /etc, /tmp, /run and /dev/shm; it shares the file system
otherwise. Nothing leads out of the switch: no host reaches this machine's network, nor the other way round.

Invariant: when the block of `rack` ends, by whatever, no process, namespace, link or folder of it is left. A rack whose
owner was killed is swept by the next one: its processes die with the owner, and its names carry the owner's pid.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.child import ends_with_us
from tests.waiting import patient, wait_until

PREFIX = "salab"  # of network namespaces and folders; the owner's pid follows
NETWORK = "10.77.0"  # /24, seen by nobody but the hosts
FIRST_ADDRESS = 11
GATEWAY = f"{NETWORK}.1"  # nobody has it; a default route is what Ray finds its own address by
SSHD_START_S = 10.0  # it listens within 0.1 s
END_S = 10.0  # the processes of a killed namespace are gone within a second
SSHD = "/usr/sbin/sshd"  # not on every user's PATH

SSHD_CONFIG = """Port 22
ListenAddress 0.0.0.0
HostKey {folder}/host_key
AuthorizedKeysFile {rack}/user_key.pub
StrictModes no
PasswordAuthentication no
UsePAM no
PidFile none
MaxStartups 100
SetEnv {environment}
"""

# Runs as the first process of the host. The folders that the host must go on seeing below /tmp are bound into its own.
INIT = """set -e
hostname {name}
ip link set lo up
mount --make-rprivate /
for seen in {seen}; do
    case $seen in
    /tmp/*) mkdir -p {folder}/tmp/${{seen#/tmp/}}; mount --rbind $seen {folder}/tmp/${{seen#/tmp/}} ;;
    esac
done
mount --bind {folder}/etc /etc
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
cd /
mount --rbind {folder}/tmp /tmp
exec {sshd} -D -e -f {folder}/sshd_config
"""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Host:
    """One test host."""

    name: str
    address: str
    folder: Path
    namespace: str
    init_pid: int  # of its first process, sshd, in this machine's numbers
    environment: Mapping[str, str]

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def command(self, *command: str, environment: Mapping[str, str] | None = None) -> list[str]:
        """`command`, to be run on the host from this machine, with nothing of this process's environment."""
        given = {"HOME": str(self.home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "dumb"}
        given |= {**self.environment, **(environment or {})}
        entering = ["nsenter", "-t", str(self.init_pid), "-m", "-n", "-p", "-u", "-i", f"--wd={self.home}"]
        return [*entering, "env", "-i", *(f"{name}={value}" for name, value in given.items()), *command]

    def run(
        self, *command: str, timeout_s: float, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run to its end; output in `stdout`, errors too."""
        return subprocess.run(
            self.command(*command, environment=environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patient(timeout_s),
            check=False,
        )

    def processes(self) -> dict[int, str]:
        """What runs on the host beside its sshd: process id (in this machine's numbers) and command line."""
        space = os.readlink(f"/proc/{self.init_pid}/ns/pid")
        found = {}
        for task in Path("/proc").glob("[0-9]*"):
            try:
                if int(task.name) == self.init_pid or os.readlink(task / "ns/pid") != space:
                    continue
                words = (task / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # ended since the listing
            line = b" ".join(words).decode(errors="replace").strip()
            if line and not line.startswith("sshd: "):  # a zombie has no command line
                found[int(task.name)] = line
        return found

    def listening(self) -> list[str]:
        """Addresses and ports on which something but sshd listens."""
        lines = self.run("ss", "-Hltn", timeout_s=10).stdout.splitlines()
        return sorted(local for line in lines if not (local := line.split()[3]).endswith(":22"))


@dataclass(frozen=True)
class Rack:
    """The hosts and what they are connected with."""

    folder: Path
    hosts: Mapping[str, Host]
    switch: str

    @property
    def key(self) -> Path:
        """The private key that lets a user in on every host."""
        return self.folder / "user_key"

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def cut(self, name: str) -> None:
        """Pull the host's cable out of the switch."""
        _run("ip", "-n", self.switch, "link", "set", f"p-{name}", "down")

    def mend(self, name: str) -> None:
        """Put it back."""
        _run("ip", "-n", self.switch, "link", "set", f"p-{name}", "up")


@contextlib.contextmanager
def rack(names: Sequence[str], *, seen: Sequence[Path], environment: Mapping[str, str]) -> Iterator[Rack]:
    """Hosts with these names, for the block.

    Args:
        seen: folders that the hosts go on seeing where they are, even below /tmp.
        environment: of every login on every host.
    """
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/var/tmp"))
    spaces = {name: f"{PREFIX}{os.getpid()}-{name}" for name in ("switch", *names)}
    processes: list[subprocess.Popen[bytes]] = []
    hosts: dict[str, Host] = {}
    try:
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "user_key"))
        _run("ip", "netns", "add", spaces["switch"])
        _run("ip", "-n", spaces["switch"], "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", spaces["switch"], "link", "set", "switch", "up")
        for index, name in enumerate(names):
            address = f"{NETWORK}.{FIRST_ADDRESS + index}"
            _plug_in(spaces["switch"], spaces[name], name, address)
            _furnish(folder, name, address, [*seen, folder], environment)
            processes.append(_boot(folder / name, spaces[name]))
            init_pid = _wait_for_sshd(processes[-1], folder / name)
            hosts[name] = Host(name, address, folder / name, spaces[name], init_pid, environment)
        yield Rack(folder, hosts, spaces["switch"])
    finally:
        for process in processes:
            process.kill()
            process.wait()
        ended = lambda: not any(host.processes() for host in hosts.values() if _lives(host.init_pid))  # noqa: E731
        with contextlib.suppress(AssertionError):  # killed processes go as the kernel gets to them
            wait_until(ended, END_S, "the hosts' processes have ended")
        for space in spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        shutil.rmtree(folder)


def _plug_in(switch: str, space: str, name: str, address: str) -> None:
    port = f"p-{name}"
    _run("ip", "netns", "add", space)
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
    _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
    _run("ip", "-n", space, "link", "set", "eth0", "up")
    _run("ip", "-n", space, "link", "set", "lo", "up")
    _run("ip", "-n", space, "route", "add", "default", "via", GATEWAY)


def _furnish(rack_folder: Path, name: str, address: str, seen: Sequence[Path], environment: Mapping[str, str]) -> None:
    folder = rack_folder / name
    for part in ("home", "tmp"):
        (folder / part).mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key"))
    # all of /etc: a mount on one of its files is lost when somebody installs a package on this machine meanwhile
    _run("cp", "-a", "/etc", str(folder / "etc"))
    users = (folder / "etc" / "passwd").read_text()
    home = f"root:x:0:0:root:{folder}/home:/bin/bash"
    (folder / "etc" / "passwd").write_text(re.sub(r"^root:.*$", home, users, flags=re.M))
    (folder / "etc" / "hosts").unlink()
    (folder / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
    given = " ".join(f'"{key}={value}"' for key, value in environment.items())
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder, rack=rack_folder, environment=given))
    text = INIT.format(name=name, folder=folder, seen=" ".join(map(str, seen)), sshd=SSHD)
    (folder / "init.sh").write_text(text)


def _boot(folder: Path, space: str) -> subprocess.Popen[bytes]:
    own = ["unshare", "--mount", "--pid", "--fork", "--uts", "--ipc", "--kill-child", "--mount-proc"]
    command = ["nsenter", f"--net=/run/netns/{space}", *own, "bash", str(folder / "init.sh")]
    with (folder / "sshd.log").open("wb") as log:
        return subprocess.Popen(
            [*ends_with_us(), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C in our terminal is ours alone: hosts end after what runs on them
        )


def _wait_for_sshd(process: subprocess.Popen[bytes], folder: Path) -> int:
    """The pid of the host's first process, once it listens."""
    log = folder / "sshd.log"

    def listens() -> bool:
        """sshd tells only its log."""
        assert process.poll() is None, f"{folder.name} has ended:\n{log.read_text()}"
        return "Server listening" in log.read_text()

    wait_until(listens, SSHD_START_S, f"{folder.name} listens", seen=log.read_text)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def left_over(owner: int | None = None) -> list[str]:
    """Namespaces and folders of racks: of this owner, or of all owners that are gone."""
    names = [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]
    names += [str(path) for path in Path("/var/tmp").glob(f"{PREFIX}*")]
    found = []
    for name in names:
        match = re.fullmatch(rf"{PREFIX}(\d+)-.*", Path(name).name)
        if match and (int(match[1]) == owner if owner is not None else not _lives(int(match[1]))):
            found.append(name)
    return found


def sweep() -> None:
    """Remove what a rack whose owner was killed has left: names and files; its processes died with it."""
    for name in left_over():
        if name.startswith("/"):
            shutil.rmtree(name)
        else:
            _run("ip", "netns", "del", name)
