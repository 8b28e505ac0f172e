"""One model's queue in virtual time, with people and a worker that follows `ModelPace`."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve_app.core.batches import ModelFigures, ModelPace

FIGURES_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Measured:
    """Slot seconds and row seconds of one run, without its first part."""

    idle_used: float  # of the slots that people left: the share in which a row ran
    mean_rows_waiting: float
    max_rows_waiting: int
    max_in_flight: int
    mean_look_ahead: float


class SimulatedQueue:
    """People come first; a row runs in a slot that no one of them needs.

    Args:
        row_s: how long the next row runs.
        people_per_s, person_s: how often people come, and how long one runs.
        way_s: from the worker to the queue, and back.
        usable: how many of the slots rows get at most (guard slots, missing KV tokens).
    """

    def __init__(
        self,
        slots: int,
        row_s: Callable[[random.Random], float],
        *,
        people_per_s: Callable[[float], float] = lambda now: 0.0,
        person_s: float = 1.0,
        way_s: float = 0.02,
        max_in_flight: int = 512,
        usable: int | None = None,
        seed: int = 1,
    ) -> None:
        self.random = random.Random(seed)
        self.slots = slots
        self.usable = slots if usable is None else usable
        self.row_s = row_s
        self.way_s = way_s
        self.people_per_s = people_per_s
        self.person_s = person_s
        self.pace = ModelPace(max_in_flight)
        self.now = 0.0
        self.events = []
        self.order = 0
        self.people = self.people_waiting = self.rows = self.rows_waiting = self.sent = 0
        self.look_ahead = 0

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        self.order += 1
        heapq.heappush(self.events, (when, self.order, action, arguments))

    def run(self, until: float, warm_up_s: float) -> Measured:
        self.at(0.0, self._ask)
        self.at(0.0, self._person_comes)
        idle = used = waited = looked = 0.0
        most_waiting = most_in_flight = 0
        while self.events[0][0] < until:
            when, _, action, arguments = heapq.heappop(self.events)
            if self.now >= warm_up_s:
                span = when - self.now
                idle += span * (self.slots - self.people)
                used += span * self.rows
                waited += span * self.rows_waiting
                looked += span * self.look_ahead
                most_waiting = max(most_waiting, self.rows_waiting)
            most_in_flight = max(most_in_flight, self.pace.in_flight)
            self.now = when
            action(*arguments)
            self._grant()
        spanned = until - warm_up_s
        return Measured(used / idle, waited / spanned, most_waiting, most_in_flight, looked / spanned)

    def _ask(self) -> None:
        self.at(self.now + self.way_s, self._figures, self.now, self.pace.in_flight)
        self.at(self.now + FIGURES_EVERY_S, self._ask)

    def _figures(self, asked_at: float, in_flight: int) -> None:
        waiting = self.people_waiting + self.rows_waiting
        figures = ModelFigures(self.slots, self.people + self.rows, waiting, self.rows_waiting)
        self.at(self.now + self.way_s, self._decide, figures, asked_at, in_flight)

    def _decide(self, figures: ModelFigures, asked_at: float, in_flight: int) -> None:
        self.pace.on_figures(figures, in_flight, asked_at, 2 * self.way_s)
        self.look_ahead = self.pace.look_ahead(figures, self.now, 2 * self.way_s)
        self._send()

    def _send(self) -> None:
        for _ in range(self.pace.may_start(self.now)):
            self.pace.on_start(self.now)
            self.at(self.now + self.way_s, self._row_comes)

    def _row_comes(self) -> None:
        self.rows_waiting += 1

    def _person_comes(self) -> None:
        rate = self.people_per_s(self.now)
        if rate > 0.0:
            self.people_waiting += 1
        self.at(self.now + self.random.expovariate(rate or 1.0), self._person_comes)

    def _grant(self) -> None:
        while self.people_waiting and self.people + self.rows < self.slots:
            self.people_waiting -= 1
            self.people += 1
            self.at(self.now + self.random.expovariate(1 / self.person_s), self._person_ends)
        while self.rows_waiting and self.people + self.rows < self.slots and self.rows < self.usable:
            self.rows_waiting -= 1
            self.rows += 1
            self.at(self.now + self.row_s(self.random), self._row_ends)

    def _person_ends(self) -> None:
        self.people -= 1

    def _row_ends(self) -> None:
        self.rows -= 1
        self.at(self.now + self.way_s, self._answer)

    def _answer(self) -> None:
        self.pace.on_end(self.now)
        self._send()
