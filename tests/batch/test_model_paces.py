"""The paces of models follow the figures of their queues while rows are in flight, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from serve_app.batch.model_paces import AWAY_S, FIGURES_S, ModelPaces
from serve_app.core.batches import ModelFigures
from tests.fakes.virtual_time import run_in_virtual_time


class Queues:
    """Figures of queues; None: they cannot be asked."""

    def __init__(self, figures: Mapping[str, ModelFigures] | None) -> None:
        self.figures, self.asked = figures, 0

    async def get(self) -> Mapping[str, ModelFigures]:
        self.asked += 1
        if self.figures is None:
            raise ConnectionError("away")
        return self.figures


@contextlib.asynccontextmanager
async def following(paces: ModelPaces) -> AsyncIterator[None]:
    task = asyncio.create_task(paces.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def test_one_row_is_sent_before_there_are_figures_and_as_many_as_are_idle_after() -> None:
    async def scenario() -> None:
        queues = Queues({"tiny": ModelFigures(8, 3, 0, 0)})
        paces = ModelPaces(queues, 100, 1)
        async with following(paces):
            await asyncio.sleep(10)  # virtual time: nothing waits
            assert queues.asked == 0, "nobody is asked while there is no row"
            assert paces.may_start("tiny") == 1
            paces.on_start("tiny")
            assert paces.may_start("tiny") == 0
            await asyncio.sleep(FIGURES_S)  # virtual time: nothing waits
            assert paces.may_start("tiny") == 5

    run_in_virtual_time(scenario())


def test_rows_of_all_models_together_have_a_bound() -> None:
    async def scenario() -> None:
        queues = Queues({name: ModelFigures(100, 0, 0, 0) for name in ("a", "b")})
        paces = ModelPaces(queues, 10, 1)
        async with following(paces):
            paces.on_start("a")
            await asyncio.sleep(2 * FIGURES_S)  # virtual time: nothing waits
            for _ in range(7):
                paces.on_start("a")
            assert (paces.may_start("a"), paces.may_start("b")) == (2, 2)

    run_in_virtual_time(scenario())


def test_a_model_that_does_not_exist_is_forgotten_with_its_row() -> None:
    async def scenario() -> None:
        paces = ModelPaces(Queues({"tiny": ModelFigures(8, 0, 0, 0)}), 100, 1)
        async with following(paces):
            for number in range(1000):
                paces.on_start(f"made-up-{number}")
                paces.on_end(f"made-up-{number}")
            paces.on_start("tiny")
            await asyncio.sleep(2 * FIGURES_S)  # virtual time: nothing waits
            assert list(paces.models()) == ["tiny"]

    run_in_virtual_time(scenario())


def test_without_figures_one_row_at_a_time_goes_on() -> None:
    async def scenario() -> None:
        queues = Queues(None)
        paces = ModelPaces(queues, 100, 1)
        async with following(paces):
            paces.on_start("tiny")
            await asyncio.sleep(5.5 * AWAY_S)  # virtual time: nothing waits
            assert queues.asked == 6
            assert paces.may_start("tiny") == 0
            paces.on_end("tiny")
            assert paces.may_start("tiny") == 1

    run_in_virtual_time(scenario())
