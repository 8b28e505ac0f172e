"""A worker removes files whose time is over, what is left of deleted ones, and old records."""

from __future__ import annotations

from tests.batch.lane import BEGIN, Lane, scenario, wall
from tests.fakes.virtual_time import time_passes


def test_files_whose_time_is_over_are_removed_except_inputs_in_use() -> None:
    async def play() -> None:
        lane = Lane({"small": 1})
        batch_id = lane.submit([{"seconds": 400.0}])
        record = lane.tables.files_["file-a"]
        lane.tables.files_["file-a"] = type(record)(
            "file-a", "team", "key", "in.jsonl", "batch", 1, BEGIN, BEGIN + 100.0
        )
        lane.start()
        await time_passes(300.0)
        assert "file-a" in lane.files.files
        [batch] = await lane.ended(batch_id)
        lane.assert_complete(batch, 1)
        await time_passes(100.0)
        assert "file-a" not in lane.files.files
        assert lane.tables.files_["file-a"].deleted_at is not None
        assert batch.output_file_id in lane.files.files
        await time_passes(2000.0)
        assert not lane.files.files
        await lane.end()

    scenario(play)


def test_what_is_left_of_a_deleted_file_is_removed() -> None:
    async def play() -> None:
        lane = Lane()
        batch_id = lane.submit([{}])
        lane.start()
        await lane.ended(batch_id)
        lane.tables.delete_file("file-a", "team", wall())  # by a router that died then
        await time_passes(100.0)
        assert "file-a" not in lane.files.files
        assert lane.tables.files_to_remove(wall(), 9) == []
        await lane.end()

    scenario(play)


def test_records_of_ended_batches_and_removed_files_go_after_their_time() -> None:
    async def play() -> None:
        lane = Lane({"small": 1}, records_keep_s=3000.0)
        over = lane.submit([{}], name="a")
        running = lane.submit([{"seconds": 9000.0}], name="b", created_at=BEGIN + 1)
        lane.start()
        [batch] = await lane.ended(over)
        assert batch.output_file_id is not None
        await time_passes(2500.0)  # its output file went after 1000 s
        assert lane.batch(over) == batch
        assert lane.tables.files_[batch.output_file_id].deleted_at is not None
        await time_passes(2500.0)
        assert list(lane.tables.batches) == [running]
        assert batch.output_file_id not in lane.tables.files_
        await lane.end()

    scenario(play)
