"""The paces of all models that one intake sends rows to, and the figures that they follow.

Invariant: what is in memory is bounded by the models of the configuration and by the rows in flight: a name that an
entry makes up is forgotten with its row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

from serve_app.batch.interfaces import Figures
from serve_app.core.batches import ModelFigures, ModelPace

logger = logging.getLogger("ray.serve")

FIGURES_S = 0.2  # between two questions for the figures
AWAY_S = 1.0  # the same after a question that was not answered


class ModelPaces:
    """How many rows of each model may be sent now.

    Args:
        max_in_flight: rows of all models together.
        senders: that fill what is idle at the same time, each its part: workers and intakes of all processes.
    """

    def __init__(self, figures: Figures, max_in_flight: int, senders: int) -> None:
        self._figures, self._max, self._senders = figures, max_in_flight, senders
        self._paces: dict[str, ModelPace] = {}
        self._in_flight = 0
        self._wanted = asyncio.Event()

    def models(self) -> Collection[str]:
        """The models with figures or rows."""
        return self._paces.keys()

    def may_start(self, model: str) -> int:
        """Rows that may be sent now."""
        left = self._max - self._in_flight
        return min(left, self._paces[model].may_start(_now()) if model in self._paces else 1)

    def on_start(self, model: str) -> None:
        """A row is sent."""
        self._in_flight += 1
        self._pace_of(model).on_start(_now())
        self._wanted.set()

    def on_end(self, model: str) -> None:
        """A row has its answer, or was given up."""
        self._in_flight -= 1
        self._paces[model].on_end(_now())

    async def run(self) -> None:
        """Follow the figures while rows are in flight, until cancelled."""
        while True:
            await self._wanted.wait()
            wait = FIGURES_S
            in_flight, asked_at = {model: pace.in_flight for model, pace in self._paces.items()}, _now()
            try:
                self._follow(await self._figures.get(), in_flight, asked_at)
            except Exception as error:  # noqa: BLE001  the quota actor may be away for a while: one row goes on
                logger.info("no figures of the queues: %s: %s", type(error).__name__, error)
                wait = AWAY_S
            if not self._in_flight:
                self._wanted.clear()
            await asyncio.sleep(wait)

    def _follow(self, figures: Mapping[str, ModelFigures], in_flight: Mapping[str, int], asked_at: float) -> None:
        for model, found in figures.items():
            self._pace_of(model).on_figures(found, in_flight.get(model, 0), asked_at, _now() - asked_at)
        for model, pace in list(self._paces.items()):
            if model not in figures and not pace.in_flight:
                del self._paces[model]

    def _pace_of(self, model: str) -> ModelPace:
        if model not in self._paces:
            self._paces[model] = ModelPace(self._max, self._senders)
        return self._paces[model]


def _now() -> float:
    return asyncio.get_running_loop().time()
