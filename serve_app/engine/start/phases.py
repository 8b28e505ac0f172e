"""The phases of an engine's start, and how long the last start took.

    environment -> (downloading) -> loading -> memory -> compile -> warm-up -> ready

This process knows the first. vLLM's own processes write the others to a file (`vllm_adapter.phase_hooks`), since the
event loop of this process waits for them. How much is loaded is read from the memory that the engine has taken, how
much is downloaded from the model cache's folder, and of how much from the hub, once a download is seen.

Invariant: `now` never raises for what it cannot read; an unknown amount is None.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from serve_app.core.memory import StartReport
from serve_app.engine.start.download_size import Download

PHASE_FILE = "SERVE_APP_START_PHASE"  # the variable with the file's path
ENVIRONMENT = "environment"
DOWNLOADING = "downloading"
LOADING = "loading"
MEMORY = "memory"
COMPILE = "compile"
WARM_UP = "warm-up"
LEAST_BYTES = 500_000_000  # smaller weights load at once, and other memory that is taken meanwhile hides them
ALMOST = 0.99  # the share of weights in memory is an estimate, and a phase that goes on is not finished


@dataclass(slots=True)
class StartPhases:
    """One start of one engine. Called by the replica's event loop and by the thread of its memory grant.

    Args:
        model: its name; the last start of this name is compared with.
        history: the folder with a file for each model.
        clock: monotonic seconds.
        weights_bytes: of the model on this machine; 0: not known, or not downloaded yet.
        cache: the model's folder in Hugging Face's cache; None: it is not from there.
        ask_hub: what is downloaded, None: not known; may take seconds, so it is called in a thread of its own.
    """

    model: str
    history: Path
    clock: Callable[[], float]
    weights_bytes: int = 0
    cache: Path | None = None
    ask_hub: Callable[[], Download | None] = lambda: None
    seconds: dict[str, float] = field(default_factory=dict, init=False)  # by phase, in order
    last_s: float | None = field(default=None, init=False)  # of the last start
    _file: Path | None = field(default=None, init=False)
    _began: float = field(default=0.0, init=False)
    _changed: float = field(default=0.0, init=False)
    _phase: str = field(default="", init=False)
    _read: int = field(default=0, init=False)  # lines of the file
    _before_bytes: int = field(default=0, init=False)  # memory taken before loading
    _download: Download | None = field(default=None, init=False)
    _asking: threading.Thread | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def begin(self) -> None:
        """The engine may load: the start begins, and vLLM's processes are told of the file."""
        descriptor, name = tempfile.mkstemp(prefix="start-", dir=os.environ.get("VLLM_RPC_BASE_PATH"))
        os.close(descriptor)
        self._file = Path(name)
        os.environ[PHASE_FILE] = name
        self.last_s = last_start_s(self.history, self.model)
        self._began = self._changed = self.clock()
        self._phase = ENVIRONMENT

    def now(self, taken_bytes: int) -> StartReport | None:
        """The present phase; None: not begun, or finished. `taken_bytes`: the engine's memory at present."""
        with self._lock:
            if not self._phase:
                return None
            self._follow(taken_bytes)
            done = None
            total = None
            share = None
            known = self._download
            weights_bytes = self.weights_bytes if known is None else known.total_bytes
            if self._phase == DOWNLOADING:
                done = downloaded_bytes(self.cache, None if known is None else known.blobs)
                total = None if known is None else known.total_bytes
            elif self._phase == LOADING and weights_bytes >= LEAST_BYTES:
                share = min(ALMOST, max(0.0, (taken_bytes - self._before_bytes) / weights_bytes))
            return StartReport(self._phase, self.clock() - self._began, share, done, self.last_s, total)

    def finish(self) -> float:
        """The engine runs; stores the seconds of each phase. Returns those of the whole start."""
        with self._lock:
            self._follow(0)
            self._enter("", self.clock())
            if self._file is not None:
                self._file.unlink(missing_ok=True)
            total_s = self.clock() - self._began
        try:
            self.history.mkdir(parents=True, exist_ok=True)
            draft = _file_of(self.history, f"{self.model}.{os.getpid()}")
            draft.write_text(json.dumps({"total_s": round(total_s, 2), "phases_s": self.seconds}))
            draft.replace(_file_of(self.history, self.model))
        except OSError:  # a read-only home: only the comparison is lost
            pass
        return total_s

    def _follow(self, taken_bytes: int) -> None:
        """Take over what vLLM's processes have written."""
        try:
            lines = self._file.read_text().splitlines() if self._file is not None else []
        except OSError:
            return
        for line in lines[self._read :]:
            phase, _, at = line.partition(" ")
            if phase != self._phase:  # each rank writes its own
                self._before_bytes = taken_bytes
                self._enter(phase, float(at))
        self._read = len(lines)
        if self._phase in (LOADING, DOWNLOADING):
            phase = DOWNLOADING if _is_downloading(self.cache) else LOADING
            if phase != self._phase:
                self._enter(phase, self.clock())
            if phase == DOWNLOADING and self._asking is None:
                self._asking = threading.Thread(target=self._ask, daemon=True, name="download size")
                self._asking.start()

    def _ask(self) -> None:
        self._download = self.ask_hub()

    def _enter(self, phase: str, at: float) -> None:
        self.seconds[self._phase] = round(self.seconds.get(self._phase, 0.0) + at - self._changed, 2)
        self._phase = phase
        self._changed = at


def write_phase(phase: str, now: float) -> None:
    """Called in vLLM's processes: the phase that begins; `now`: monotonic seconds, which all processes share."""
    name = os.environ.get(PHASE_FILE)
    if name and os.path.exists(name):
        with open(name, "a") as file:
            file.write(f"{phase} {now}\n")


def last_start_s(history: Path, model: str) -> float | None:
    try:
        return float(json.loads(_file_of(history, model).read_text())["total_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file_of(history: Path, model: str) -> Path:
    return history / f"{quote(model, safe='')}.json"


def downloaded_bytes(cache: Path | None, blobs: Collection[str] | None = None) -> int:
    """What is in the model's folder of the cache, unfinished files included; `blobs`: of these files alone."""
    if cache is None:
        return 0
    sizes: dict[str, int] = {}  # of a file, of which a download that was cut off may have left a part, the larger one
    try:
        for file in os.scandir(cache / "blobs"):
            name = file.name.partition(".")[0]
            if blobs is None or name in blobs:
                sizes[name] = max(sizes.get(name, 0), file.stat().st_size)
    except OSError:  # one was renamed meanwhile; the next look is right
        return 0
    return sum(sizes.values())


def _is_downloading(cache: Path | None) -> bool:
    """Whether there is an unfinished file; what is left of a download that was cut off does not count for ever."""
    if cache is None:
        return False
    parts = (cache / "blobs").glob("*.incomplete")
    return any(not (part.parent / part.name.partition(".")[0]).exists() for part in parts)
