"""A user who has just come: an empty HOME, the commands, and HTTP.

Invariant: every process that it starts has this HOME in its environment, and its temporary files lie there, too; so
what is left is found without knowing what was started.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import psutil

from tests.first_hour.documents import ROOT
from tests.first_hour.walk import StepFailedError
from tests.interruptible import interruptible
from tests.waiting import patient, quiet_time, wait_until

SERVE_APP = ".venv/bin/serve-app"
PYTHON = ".venv/bin/python"
# What somebody has set who did not just come, and what `make` passes on to the commands of a recipe.
NOT_YET_SET = (
    "RAY_", "SERVE_APP_", "OPENAI_", "VLLM_", "HF_", "XDG_", "PYTHON", "VIRTUAL_ENV",
    "MAKE", "MFLAGS", "MODEL", "CONFIG", "PORT",
)  # fmt: skip
TAIL_LINES = 40  # of what a failed command printed
POLL_S = 0.2
END_S = 60.0  # `serve-app up` needs 20 s to end everything on an idle machine


class Newcomer:
    """Runs commands in the checkout.

    Args:
        home: an empty folder with a path that is short enough for sockets in it.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_YET_SET)}
        self._environment = kept | {"HOME": str(home), "TMPDIR": str(home)}
        self._until = quiet_time()
        self._started: list[Background] = []

    def begin(self, limit_s: float) -> None:
        """The next step begins; nothing in it takes longer than that, in seconds of a quiet machine."""
        self._until = quiet_time() + limit_s

    @property
    def left_s(self) -> float:
        """Of the step, in seconds of a quiet machine.

        Raises:
            StepFailedError: nothing is left.
        """
        left_s = self._until - quiet_time()
        if left_s <= 0:
            raise StepFailedError("its time is over")
        return left_s

    def run(self, *command: str, status: int = 0, folder: Path = ROOT) -> str:
        """What a command prints to its standard output.

        Raises:
            StepFailedError: another exit status, or it did not end in time.
        """
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=patient(self.left_s),
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            printed = b"".join(text for text in (late.stdout, late.stderr) if isinstance(text, bytes))
            raise failed(command, printed.decode(errors="replace"), f"not done after {late.timeout:.0f} s") from None
        if done.returncode != status:
            raise failed(command, done.stdout + done.stderr, f"exit status {done.returncode}, not {status}")
        return done.stdout

    def serve_app(self, *arguments: str, status: int = 0, folder: Path = ROOT) -> str:
        return self.run(str(ROOT / SERVE_APP), *arguments, status=status, folder=folder)

    def start(self, *command: str) -> Background:
        """A command that goes on in the background."""
        begun = Background(command, self.home / f"{Path(command[0]).name}.log", self._environment)
        self._started.append(begun)
        return begun

    def file(self, name: str, text: str) -> str:
        """The path of a new file in HOME."""
        path = self.home / name
        path.write_text(text)
        return str(path)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs with this HOME."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or is of another user
                if process.environ().get("HOME") == str(self.home) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self) -> None:
        """End whatever runs still, first as Ctrl-C does."""
        for begun in self._started:
            begun.interrupt(END_S)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Background:
    """A command in the background, as with `&` in a shell."""

    def __init__(self, command: tuple[str, ...], log: Path, environment: dict[str, str]) -> None:
        self._command = command
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                interruptible(command),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_line(self, pattern: str, limit_s: float) -> re.Match[str]:
        """The first line that it prints which is like this.

        Raises:
            StepFailedError: it has ended, or the time is over.
        """

        def printed() -> str:
            return self._log.read_text(errors="replace")

        def look() -> re.Match[str] | None:
            has_ended = self.process.poll() is not None
            match = re.search(pattern, printed(), re.MULTILINE)
            if match is None and has_ended:
                raise failed(self._command, printed(), f"it has ended with exit status {self.process.returncode}")
            return match

        try:
            match = wait_until(look, limit_s, f"a line like {pattern!r}", poll_s=POLL_S).found
        except AssertionError as late:
            raise failed(self._command, printed(), str(late)) from None
        assert match is not None
        return match

    def await_end(self, limit_s: float) -> int:
        """Its exit status.

        Raises:
            StepFailedError: it goes on.
        """
        try:
            return self.process.wait(patient(limit_s))
        except subprocess.TimeoutExpired:
            raise failed(self._command, self._log.read_text(errors="replace"), "it goes on") from None

    def interrupt(self, limit_s: float) -> None:
        """Ctrl-C, if it runs still."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patient(limit_s))


def failed(command: tuple[str, ...], printed: str, why: str) -> StepFailedError:
    tail = "\n".join(printed.rstrip().splitlines()[-TAIL_LINES:])
    return StepFailedError(f"{why}\n$ {shlex.join(command)}\n{tail}")
