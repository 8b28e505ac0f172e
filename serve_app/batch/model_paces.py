"""The paces of all models in one worker process: rows of files and entries of streams are sent by the same ones.

Whoever sends rows is a sender. While several have rows of a model that could start, the next one is of the sender with
the fewest in flight.

Invariant: a row in flight is counted once, whoever sent it, and the figures are read once for all. What is in memory is
bounded by the models of the configuration and the rows in flight: a name that somebody makes up is forgotten with them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from serve_app.batch.calls import bounded, loop_time
from serve_app.batch.interfaces import Figures
from serve_app.core.batches import ModelFigures, ModelPace, WaitingRows, share_rows

logger = logging.getLogger("ray.serve")

FIGURES_EVERY_S = 0.2  # the queue actor makes no newer ones
AWAY_EVERY_S = 1.0  # the same after a question that was not answered
FIGURES_S = 5.0  # for an answer; a router restarts in this time


class ModelPaces:
    """How many rows of each model may be sent now.

    Args:
        max_in_flight: rows of a model in this process.
        workers: processes that send rows at the same time: each fills its part of what is idle.
    """

    def __init__(self, figures: Figures, max_in_flight: int, workers: int) -> None:
        self.max_in_flight = max_in_flight
        self._figures = figures
        self._workers = workers
        self._paces: dict[str, ModelPace] = {}
        self._senders: list[RowSender] = []
        self._wanted = asyncio.Event()

    def sender(self) -> RowSender:
        """One more, until its `close`."""
        made = RowSender(self)
        self._senders.append(made)
        return made

    def remove(self, sender: RowSender) -> None:
        self._senders.remove(sender)

    def models(self) -> Collection[str]:
        """The models with figures or rows."""
        return self._paces.keys()

    def ends_per_s(self, model: str) -> float:
        return self._paces[model].ends_per_s(loop_time()) if model in self._paces else 0.0

    def may_start(self, model: str, sender: RowSender) -> int:
        """Rows of a sender that may be sent now, if it has so many."""
        free = self._paces[model].may_start(loop_time()) if model in self._paces else 1
        rows = {str(number): one.waiting.get(model, 0) for number, one in enumerate(self._senders) if one is not sender}
        if not free or not any(rows.values()):
            return free
        own_number = str(self._senders.index(sender))
        waiting = [WaitingRows(name, name, 0.0, count) for name, count in {**rows, own_number: free}.items()]
        in_flight = {str(number): one.in_flight[model] for number, one in enumerate(self._senders)}
        return share_rows(free, waiting, in_flight, {}).get(own_number, 0)

    def on_start(self, model: str) -> None:
        self._pace_of(model).on_start(loop_time())
        self._wanted.set()

    def on_end(self, model: str) -> None:
        self._paces[model].on_end(loop_time())
        self._changed()

    async def run(self) -> None:
        """Follow the figures while rows are in flight, until cancelled."""
        is_away = False
        while True:
            await self._wanted.wait()
            in_flight = {model: pace.in_flight for model, pace in self._paces.items()}
            asked_at = loop_time()
            try:
                self._follow(await bounded(self._figures.get(), FIGURES_S), in_flight, asked_at)
                is_away = False
            except Exception as error:  # noqa: BLE001  the quota actor may be away for a while: one row goes on
                if not is_away:
                    cause = f"{type(error).__name__}: {error}"
                    logger.warning("Batch worker got no queue figures; each model keeps one row in flight: %s", cause)
                is_away = True
            if not any(pace.in_flight for pace in self._paces.values()):
                self._wanted.clear()
            await asyncio.sleep(AWAY_EVERY_S if is_away else FIGURES_EVERY_S)

    def _follow(self, figures: Mapping[str, ModelFigures], in_flight: Mapping[str, int], asked_at: float) -> None:
        hand_over_s = loop_time() - asked_at + max((one.prepare_s for one in self._senders), default=0.0)
        for model, found in figures.items():
            self._pace_of(model).on_figures(found, in_flight.get(model, 0), asked_at, hand_over_s)
        for model, pace in list(self._paces.items()):
            if model not in figures and not pace.in_flight:
                del self._paces[model]
        self._changed()

    def _changed(self) -> None:
        for sender in list(self._senders):
            sender.on_change()

    def _pace_of(self, model: str) -> ModelPace:
        if model not in self._paces:
            self._paces[model] = ModelPace(self.max_in_flight, self._workers)
        return self._paces[model]


class RowSender:
    """What one sender of rows has of the paces; made by `ModelPaces.sender`.

    `on_change`: more rows may start, perhaps. `prepare_s`: from a row's start until its request is sent, about.
    """

    def __init__(self, paces: ModelPaces) -> None:
        self.in_flight: Counter[str] = Counter()
        self.waiting: dict[str, int] = {}
        self.prepare_s = 0.0
        self.on_change: Callable[[], None] = lambda: None
        self._paces = paces

    @property
    def max_in_flight(self) -> int:
        return self._paces.max_in_flight

    def models(self) -> Collection[str]:
        """See `ModelPaces`."""
        return self._paces.models()

    def ends_per_s(self, model: str) -> float:
        """Of all senders."""
        return self._paces.ends_per_s(model)

    def may_start(self, model: str) -> int:
        """See `ModelPaces`."""
        return self._paces.may_start(model, self)

    def wait(self, model: str, rows: int) -> None:
        """So many rows could start, and wait only for `may_start`: the others leave them their part."""
        if rows:
            self.waiting[model] = rows
        else:
            self.waiting.pop(model, None)

    def on_start(self, model: str) -> None:
        """A row is sent."""
        self.in_flight[model] += 1
        self._paces.on_start(model)

    def on_end(self, model: str) -> None:
        """A row has its answer, or was given up."""
        self.in_flight[model] -= 1
        if not self.in_flight[model]:
            del self.in_flight[model]
        self._paces.on_end(model)

    def close(self) -> None:
        """No row of it waits any more."""
        self._paces.remove(self)
