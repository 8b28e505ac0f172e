"""The parent's end of an engine's process (`benchmarks.strategies.child`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from benchmarks.common.arms import ENGINE_VARIABLES, ROOT, BenchmarkError
from benchmarks.strategies.orders import OpenRun, Ran, Started
from benchmarks.strategies.workload import MAX_MODEL_LEN

END_S = 30.0  # of a process whose input has ended; its engine is killed within a second
LOG_TAIL_BYTES = 3000  # of its error output, when it fails
BATCHED_TOKENS = 8192  # a step may read a whole batch of prompts, as the preset `balanced` has it

Answer = TypeVar("Answer", Started, Ran)


def settings_of(engine: str, slots: int, **more: Any) -> dict[str, Any]:
    """The built-in model with so many slots, all of them for requests; nothing is cached between requests."""
    return {
        "name": "tiny",
        "engine": engine,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": slots,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "session_slots": 0,
        "enable_prefix_caching": False,
        "simulated": {"decode_step_s": 0.002, "kv_cache_tokens": 1_000_000},
        **more,
    }


class EngineProcess:
    """A started engine; `info` is what it says of itself."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENGINE_VARIABLES)}
        self._log = log
        self._children: set[psutil.Process] = set()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.strategies.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=environment,
            )
        self._write(settings)
        self.info = self._read(Started)

    def run(self, order: OpenRun) -> Ran:
        """BenchmarkError: the process has ended; its last words are in it."""
        self._write(order)
        return self._read(Ran)

    def end(self) -> None:
        """Returns when the process and the engine's are gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._children |= set(psutil.Process(self._process.pid).children(recursive=True))
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in self._children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def _write(self, value: Any) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(msgspec.json.encode(value) + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _read(self, kind: type[Answer]) -> Answer:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise self._failure()
        return msgspec.json.decode(line, type=kind)

    def _failure(self) -> BenchmarkError:
        self.end()
        return BenchmarkError(f"the engine's process has ended: {self._log.read_bytes()[-LOG_TAIL_BYTES:].decode()}")


@contextmanager
def engine_process(settings: dict[str, Any]) -> Iterator[EngineProcess]:
    """An engine for as long as the context lasts.

    Raises:
        BenchmarkError: it did not start.
    """
    with tempfile.TemporaryDirectory(prefix="serve-bench-") as folder:
        engine = EngineProcess(settings, Path(folder) / "engine.log")
        try:
            yield engine
        finally:
            engine.end()
