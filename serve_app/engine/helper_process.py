"""A child process that answers one question after the other: for work that would stop the event loop, in a thread too.

Messages are frames: their length in eight bytes, then as many bytes. The first one tells the child its set-up; of the
others each is a question, and the child writes one answer to its standard output. It ends with its input, so it never
outlives the process that has started it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from typing import BinaryIO

from serve_app.errors import Unavailable

ANSWER_S = 120.0  # the first answer comes after the child's imports, which take 4 s on an idle machine
# What runs `vllm_adapter.render_process`, whose memory is not the engine's: it has none before the first large request.
RENDER_PROCESS = ["-m", "serve_app.engine.vllm_adapter.render_process"]
RETRY_AFTER_S = 5.0  # of a request whose child is being restarted
_LENGTH_BYTES = 8


def frame(message: bytes) -> bytes:
    """A message as it is written."""
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


def read_message(stream: BinaryIO) -> bytes | None:
    """The next message; None: the other side has ended."""
    length = stream.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    message = stream.read(size := int.from_bytes(length, "little"))
    return message if len(message) == size else None


class HelperProcess:
    """The child, started now and restarted when it has ended. Calls block; use one thread at a time.

    Args:
        task: what it does, for errors: "compiles grammars".
        arguments: of the Python interpreter.
        setup: the first message.
        tries: how often a question is asked whose child has ended at it. More than one for a child that no question
            can end: else each try is one more child for the one that does, while all others wait.
    """

    def __init__(self, task: str, arguments: list[str], setup: bytes, tries: int = 1) -> None:
        self._task = task
        self._arguments = arguments
        self._setup = setup
        self._tries = tries
        self.process = self._start()

    def ask(self, question: bytes) -> bytes:
        """The answer. Raises Unavailable: the child does not answer, or has ended at each try."""
        for _ in range(self._tries):
            if (answer := self._ask(question)) is not None:
                return answer
        raise Unavailable(f"the process that {self._task} has ended and is restarted", retry_after_s=RETRY_AFTER_S)

    def end(self) -> None:
        """End the child. Idempotent."""
        with contextlib.suppress(BrokenPipeError), self.process as process:
            process.kill()

    def _ask(self, question: bytes) -> bytes | None:
        """The answer; None: the child has ended, for no reason that it told. Raises Unavailable: none came."""
        if self.process.poll() is not None:
            self.end()
            self.process = self._start()
        process = self.process
        setting_up = self._setting_up
        is_late = threading.Event()
        assert process.stdout is not None

        def give_up() -> None:
            is_late.set()
            process.kill()

        late = threading.Timer(ANSWER_S, give_up)
        late.start()
        try:
            setting_up.join()
            self._send(process, question)
            answer = read_message(process.stdout)  # type: ignore[arg-type]
        except OSError:
            answer = None
        finally:
            late.cancel()
        if answer is None:
            self.end()
        if is_late.is_set():
            raise Unavailable(f"the process that {self._task} does not answer", retry_after_s=RETRY_AFTER_S)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, *self._arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._setting_up = threading.Thread(target=self._set_up, args=(process,), daemon=True)
        self._setting_up.start()
        return process

    def _set_up(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError):  # it has ended: who asks it finds out
            self._send(process, self._setup)

    def _send(self, process: subprocess.Popen[bytes], message: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(frame(message))
        process.stdin.flush()
