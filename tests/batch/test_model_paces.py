"""The paces of models follow the figures of their queues while rows are in flight, and senders of rows share them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from hypothesis import given
from hypothesis import strategies as st

from serve_app.batch.model_paces import AWAY_EVERY_S, FIGURES_EVERY_S, ModelPaces, RowSender
from serve_app.core.batches import ModelFigures
from tests.fakes.virtual_time import run_in_virtual_time


class Queues:
    """Figures of queues; None: they cannot be asked."""

    def __init__(self, figures: Mapping[str, ModelFigures] | None) -> None:
        self.figures = figures
        self.asked = 0

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


def start_all(sender: RowSender, model: str) -> int:
    """Start what may start; how many."""
    count = sender.may_start(model)
    for _ in range(count):
        sender.on_start(model)
    return count


def test_one_row_is_sent_before_there_are_figures_and_as_many_as_are_idle_after() -> None:
    async def scenario() -> None:
        queues = Queues({"tiny": ModelFigures(8, 3, 0, 0)})
        paces = ModelPaces(queues, 100, 1)
        sender = paces.sender()
        async with following(paces):
            await asyncio.sleep(10)  # virtual time: nothing waits
            assert queues.asked == 0, "nobody is asked while there is no row"
            assert sender.may_start("tiny") == 1
            sender.on_start("tiny")
            assert sender.may_start("tiny") == 0
            await asyncio.sleep(FIGURES_EVERY_S)  # virtual time: nothing waits
            assert sender.may_start("tiny") == 5

    run_in_virtual_time(scenario())


def test_the_bound_is_of_each_model_and_counts_the_rows_of_all_senders() -> None:
    async def scenario() -> None:
        paces = ModelPaces(Queues({name: ModelFigures(100, 0, 0, 0) for name in ("a", "b")}), 10, 1)
        item = paces.sender()
        other = paces.sender()
        async with following(paces):
            item.on_start("a")
            await asyncio.sleep(2 * FIGURES_EVERY_S)  # virtual time: nothing waits
            for _ in range(7):
                item.on_start("a")
            assert [sender.may_start("a") for sender in (item, other)] == [2, 2]
            assert other.may_start("b") == 10

    run_in_virtual_time(scenario())


def test_a_model_that_does_not_exist_is_forgotten_with_its_row() -> None:
    async def scenario() -> None:
        paces = ModelPaces(Queues({"tiny": ModelFigures(8, 0, 0, 0)}), 100, 1)
        sender = paces.sender()
        async with following(paces):
            for number in range(1000):
                sender.on_start(f"made-up-{number}")
                sender.on_end(f"made-up-{number}")
            sender.on_start("tiny")
            await asyncio.sleep(2 * FIGURES_EVERY_S)  # virtual time: nothing waits
            assert list(paces.models()) == ["tiny"]
            assert list(sender.in_flight) == ["tiny"]

    run_in_virtual_time(scenario())


def test_without_figures_one_row_at_a_time_goes_on() -> None:
    async def scenario() -> None:
        queues = Queues(None)
        paces = ModelPaces(queues, 100, 1)
        sender = paces.sender()
        async with following(paces):
            sender.on_start("tiny")
            await asyncio.sleep(5.5 * AWAY_EVERY_S)  # virtual time: nothing waits
            assert queues.asked == 6
            assert sender.may_start("tiny") == 0
            sender.on_end("tiny")
            assert sender.may_start("tiny") == 1

    run_in_virtual_time(scenario())


def test_a_queue_actor_that_hangs_is_asked_again() -> None:
    class Hanging(Queues):
        async def get(self) -> Mapping[str, ModelFigures]:
            self.asked += 1
            if self.asked == 1:
                await asyncio.Event().wait()
            return {"tiny": ModelFigures(8, 0, 0, 0)}

    async def scenario() -> None:
        paces = ModelPaces(Hanging(None), 100, 1)
        sender = paces.sender()
        async with following(paces):
            sender.on_start("tiny")
            await asyncio.sleep(10.0)  # virtual time: nothing waits
            assert sender.may_start("tiny") > 1

    run_in_virtual_time(scenario())


async def idle(paces: ModelPaces, sender: RowSender) -> None:
    """Wait until the figures are there."""
    sender.on_start("tiny")
    await asyncio.sleep(2 * FIGURES_EVERY_S)  # virtual time: nothing waits
    sender.on_end("tiny")


def test_a_sender_whose_rows_wait_gets_the_next_places_until_it_has_as_many() -> None:
    async def scenario() -> None:
        paces = ModelPaces(Queues({"tiny": ModelFigures(8, 0, 0, 0)}), 8, 1)
        files = paces.sender()
        stream = paces.sender()
        async with following(paces):
            await idle(paces, files)
            assert start_all(files, "tiny") == 8
            stream.wait("tiny", 1)
            assert [stream.may_start("tiny"), files.may_start("tiny")] == [0, 0]
            for number in range(4):
                files.on_end("tiny")
                files.wait("tiny", 1000)
                assert (files.may_start("tiny"), stream.may_start("tiny")) == (0, 1), number
                stream.on_start("tiny")
            files.on_end("tiny")
            assert files.may_start("tiny") == 1, "both have four, less the one that ended"
            stream.wait("tiny", 0)
            stream.on_end("tiny")
            assert files.may_start("tiny") == 2, "the other has no row that waits"

    run_in_virtual_time(scenario())


def test_a_sender_that_is_closed_keeps_no_place_and_all_hear_of_a_free_one() -> None:
    async def scenario() -> None:
        paces = ModelPaces(Queues({"tiny": ModelFigures(8, 0, 0, 0)}), 8, 1)
        files = paces.sender()
        stream = paces.sender()
        received: list[str] = []
        files.on_change = lambda: received.append("files")
        stream.on_change = lambda: received.append("stream")
        async with following(paces):
            await idle(paces, files)
            assert {"files", "stream"} == set(received)
            stream.wait("tiny", 8)
            assert files.may_start("tiny") == 4
            stream.close()
            assert files.may_start("tiny") == 8

    run_in_virtual_time(scenario())


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), min_size=1, max_size=4), st.integers(1, 30))
def test_senders_start_together_as_many_rows_as_are_free_and_the_fewest_in_flight_are_first(
    senders: list[tuple[int, int]], slots: int
) -> None:
    """Args: senders: rows that wait and rows in flight."""

    async def scenario() -> None:
        paces = ModelPaces(Queues({"tiny": ModelFigures(slots, 0, 0, 0)}), 1000, 1)
        made = [paces.sender() for _ in senders]
        async with following(paces):
            await idle(paces, made[0])
            left = {sender: waiting for sender, (waiting, _) in zip(made, senders, strict=True)}
            for sender, (_, rows) in zip(made, senders, strict=True):
                for _ in range(rows):
                    sender.on_start("tiny")
            free = made[0].may_start("tiny")
            for sender, waiting in left.items():
                sender.wait("tiny", waiting)
            for _ in range(min(free, sum(left.values()))):
                ready = [sender for sender in made if left[sender] and sender.may_start("tiny")]
                fewest = min(sender.in_flight["tiny"] for sender in made if left[sender])
                assert fewest in {sender.in_flight["tiny"] for sender in ready}
                ready[-1].on_start("tiny")
                left[ready[-1]] -= 1
                ready[-1].wait("tiny", left[ready[-1]])
            assert not any(sender.may_start("tiny") for sender in made if left[sender])

    run_in_virtual_time(scenario())
