"""What watches a stack while it is measured: a console and a scraper.

Invariant: after `close` no thread of a watcher runs; a watcher that failed says so in `failures`, and its run counts
for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import requests

from benchmarks.common.scaling_stack import Stage

SCRAPE_EVERY_S = 15.0  # Prometheus' own default is a minute, its tutorials and charts have 15 s
READ_TIMEOUT_S = 30.0  # of one piece of a stream; the console's stream has an event every two seconds
CHUNK_BYTES = 4096
END_S = READ_TIMEOUT_S + 5.0


class Watcher:
    """A thread that repeats `step` until it is closed."""

    def __init__(self, step: Callable[[], None], every_s: float) -> None:
        self.failures: list[str] = []
        self._step = step
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(END_S)

    @property
    def is_closing(self) -> bool:
        return self._stop.is_set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._step()
            except (requests.RequestException, AssertionError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            self._stop.wait(self._every_s)


class Console(Watcher):
    """A console's stream. `received`: bytes of its events, as the browser gets them, without HTTP's own."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(self._follow, 1.0)
        self.received = 0
        self._stage = stage

    def _follow(self) -> None:
        with requests.get(
            f"{self._stage.cluster.url}/console/live",
            headers={"Authorization": f"Bearer {self._stage.key}"},
            stream=True,
            timeout=READ_TIMEOUT_S,
        ) as answer:
            answer.raise_for_status()
            for data in answer.iter_content(CHUNK_BYTES):
                self.received += len(data)
                if self.is_closing:
                    return
        if not self.is_closing:
            raise AssertionError("the console's stream ended by itself")


class Scraper(Watcher):
    """Prometheus' part of a scrape. `series`: of the last one."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(self._scrape, SCRAPE_EVERY_S)
        self.series = 0
        self.scrapes = 0
        self._stage = stage

    def _scrape(self) -> None:
        self.series = series_of(self._stage)
        self.scrapes += 1


def series_of(stage: Stage) -> int:
    """The series that a scrape of the whole deployment has."""
    answer = stage.get("/metrics")
    answer.raise_for_status()
    return sum(1 for line in answer.text.splitlines() if line and not line.startswith("#"))
