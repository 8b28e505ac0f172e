"""Random histories of workers that die, come late and repeat their calls, over restarts of the store, against a model
in plain dictionaries."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from serve_app.core.batches import BatchRecord, BatchStatus, ClaimedRow, FileRecord, NewRow, RowResult
from serve_app.store.sql import SqlStore
from serve_app.store.sql_batches import SqlBatches
from tests.effort import effort

HISTORIES = effort(1, 4)  # of each database; one meets every act several times
STEPS = 120
LEASE_S = 30.0
ROWS = 24  # of a batch
BATCHES = ("batch_1", "batch_2")
MODELS = ("a", "b")
Key = tuple[str, int]


@dataclass
class ModelRow:
    """What a row has to be."""

    key: Key
    new: NewRow
    worker: str | None = None
    leased_until: float = 0.0
    attempts: int = 0
    result: RowResult | None = None

    def is_free(self, now: float) -> bool:
        return self.result is None and (self.worker is None or self.leased_until <= now)

    def claimed(self) -> ClaimedRow:
        new = self.new
        return ClaimedRow(self.key[0], new.number, new.offset, new.length, new.custom_id, new.model, self.attempts)

    def free(self) -> None:
        self.worker = None
        self.leased_until = 0.0


@dataclass
class History:
    """One seed. A worker that dies leaves its rows to their lease; its results may still come, late."""

    seed: int
    url: str
    now: float = 1_000_000.0
    count: int = 0
    rows: dict[Key, ModelRow] = field(default_factory=dict)
    held: dict[str, list[Key]] = field(default_factory=dict)  # by worker that lives
    orphans: list[Key] = field(default_factory=list)  # of workers that died
    is_running: dict[str, bool] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        self.draw = random.Random(self.seed)
        self.restart("")
        for batch_id in BATCHES:
            self.begin(batch_id)
        acts = (self.claim, self.write, self.renew, self.release, self.die, self.late, self.restart, self.cancel)
        for step in range(STEPS):
            self.now += self.draw.choice((0.0, 1.0, 8.0))
            act = self.draw.choices(acts, (30, 25, 10, 8, 3, 6, 2, 1 if step > STEPS // 2 else 0))[0]
            act(f"w{self.draw.randrange(3)}-{step // 40}")
            self.check()
        self.now += LEASE_S
        while any(row.result is None for row in self.rows.values() if self.is_running[row.key[0]]):
            self.claim("last")
            self.write("last")
        self.check()

    @property
    def batches(self) -> SqlBatches:
        return self.store.batches

    def twice(self) -> range:
        """A call whose answer was lost is repeated."""
        return range(self.draw.choice((1, 1, 2)))

    def begin(self, batch_id: str) -> None:
        now = self.now
        record = BatchRecord(batch_id, "t", "k", "/v1/completions", "file-1", "24h", BatchStatus.VALIDATING, now, 9e9)
        self.batches.add_file(FileRecord("file-1", "t", "k", "rows.jsonl", "batch", 1, now, None))
        self.batches.create_batch(record)
        new = [
            NewRow(n, 100 * n, 90, f"c{n}", self.draw.choice(MODELS), self.draw.randrange(-3, 3))
            for n in range(1, ROWS + 1)
        ]
        self.batches.add_rows(batch_id, new[:10])  # by a validation that was killed
        for added in (ROWS - 10, 0):
            assert self.batches.add_rows(batch_id, self.draw.sample(new, ROWS)) == added
        fields = {"status": BatchStatus.IN_PROGRESS, "in_progress_at": now, "total": ROWS}
        for _ in range(2):
            changed = self.batches.change_batch(batch_id, if_status=[BatchStatus.VALIDATING], **fields)
            assert changed is not None
        self.rows |= {(batch_id, one.number): ModelRow((batch_id, one.number), one) for one in new}
        self.is_running[batch_id] = True

    def claim(self, worker: str) -> None:
        batch_id = self.draw.choice(BATCHES)
        model = self.draw.choice(MODELS)
        limit = self.draw.randrange(1, 6)
        free = [row for row in self.rows.values() if row.key[0] == batch_id and row.new.model == model]
        free = [row for row in free if row.is_free(self.now) and self.is_running[batch_id]]
        expected = sorted(free, key=lambda row: (row.new.prefix, row.new.number))[:limit]
        self.count += 1
        for _ in self.twice():
            found = self.batches.claim_rows(worker, batch_id, model, limit, LEASE_S, f"claim {self.count}")
            assert found == [row.claimed() for row in expected]
        for row in expected:
            self.happened["taken over"] += row.worker is not None
            row.worker = worker
            row.leased_until = self.now + LEASE_S
        self.held.setdefault(worker, []).extend(row.key for row in expected)

    def write(self, worker: str) -> None:
        chosen = [key for key in self.held.get(worker, []) if self.draw.random() < 0.6]
        self.held[worker] = [key for key in self.held.get(worker, []) if key not in chosen]
        self.add_results(chosen)

    def late(self, _: str) -> None:
        self.add_results(self.draw.sample(self.orphans, min(3, len(self.orphans))))

    def add_results(self, keys: Sequence[Key]) -> None:
        results = [RowResult(*key, self.draw.random() < 0.3, str(self.draw.random())) for key in keys]
        expected = {(one.batch_id, one.number) for one in results if self.rows[one.batch_id, one.number].result is None}
        for _ in self.twice():
            written = self.batches.add_results(results)
            assert len(written) == len(set(written))
            assert set(written) == expected
            for result in results:
                row = self.rows[result.batch_id, result.number]
                if row.result is None:  # a worker may have had the row twice: its first result counts
                    self.happened["late"] += row.worker is None or row.leased_until <= self.now
                    row.result = result
                    row.free()
            expected = set()

    def renew(self, worker: str) -> None:
        rows = [row for row in self.rows.values() if row.worker == worker]
        for _ in self.twice():
            assert self.batches.renew(worker, LEASE_S) == len(rows)
        for row in rows:
            row.leased_until = self.now + LEASE_S

    def release(self, worker: str) -> None:
        keys = self.held.pop(worker, [])
        count_attempt = self.draw.random() < 0.5
        held = [self.rows[key] for key in keys if self.rows[key].worker == worker]
        for number in self.twice():
            released = self.batches.release_rows(worker, keys, count_attempt=count_attempt)
            assert released == (0 if number else len({row.key for row in held}))
        for row in {row.key: row for row in held}.values():
            row.attempts += count_attempt
            row.free()

    def die(self, worker: str) -> None:
        self.orphans += self.held.pop(worker, [])

    def cancel(self, _: str) -> None:
        batch_id = BATCHES[1]
        for _ in self.twice():
            changed = self.batches.change_batch(
                batch_id, if_status=[BatchStatus.IN_PROGRESS], status=BatchStatus.CANCELLING, cancelling_at=1.0
            )
            assert changed is not None
        self.is_running[batch_id] = False

    def restart(self, _: str) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.store = SqlStore(self.url, lambda: self.now)

    def check(self) -> None:
        work = {one.batch.batch_id: one for one in self.batches.work()}
        for batch_id in BATCHES:
            rows = [row for row in self.rows.values() if row.key[0] == batch_id]
            rows.sort(key=lambda row: row.key)
            results = [row.result for row in rows if row.result is not None]
            failed = [one for one in results if one.is_failed]
            found = self.batches.batch(batch_id, None)
            assert (found.completed, found.failed, found.total) == (len(results) - len(failed), len(failed), ROWS)
            assert self.pages(batch_id, failed=True) == failed
            assert self.pages(batch_id, failed=False) == [one for one in results if not one.is_failed]
            left = [row for row in rows if row.result is None]
            assert self.batches.unfinished(batch_id, 0, ROWS) == [row.claimed() for row in left]
            free = Counter(row.new.model for row in left if row.is_free(self.now))
            assert (work[batch_id].waiting, work[batch_id].running) == (dict(free), len(left) - free.total())

    def pages(self, batch_id: str, *, failed: bool) -> list[RowResult]:
        found = list[RowResult]()
        page = list[RowResult]()
        while not found or page:
            after = found[-1].number if found else 0
            page = self.batches.results(batch_id, failed=failed, after=after, limit=7)
            found += page
            if not found:
                break
        return found


@pytest.fixture(params=range(HISTORIES))
def history(request: pytest.FixtureRequest, url: str) -> Iterator[History]:
    made = History(request.param, url)
    made.run()
    yield made
    made.store.close()


def test_no_row_is_lost_and_none_has_two_results_whatever_workers_do(history: History) -> None:
    assert all(row.result is not None for row in history.rows.values() if history.is_running[row.key[0]])
    assert history.happened["taken over"] > 0
    assert history.happened["late"] > 0
    for batch_id in BATCHES:
        history.batches.forget_rows(batch_id)
        assert history.batches.unfinished(batch_id, 0, ROWS) == history.pages(batch_id, failed=False) == []
    assert history.batches.add_results([RowResult(*key, False, "late") for key in history.rows]) == []
