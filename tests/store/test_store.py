from __future__ import annotations

import asyncio
from pathlib import Path

from serve_app.core.limits import Limits
from serve_app.core.usage import InFlightCount, UsageBatch, UsageRow
from serve_app.store import KeyRecord, SqlStore, Store, UsageQuery, Used, new_key_id


def test_first(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store.direct(SqlStore(f"sqlite:///{tmp_path}/s.db"))
        assert await store.keys_since(0) == (0, [])
        record = KeyRecord(new_key_id(), "n", "t", b"1" * 32, models=("a",), limits=Limits(requests_per_minute=6.5))
        made = await store.create_key(record)
        assert made.version == 1
        assert (made.limits, made.models) == (record.limits, ("a",))
        changed = await store.change_key(made.key_id, revoked_at=4.5)
        assert await store.keys_since(1) == (2, [changed])
        assert await store.keys_since(2) == (2, [])
        assert await store.keys_since(9) == (2, [changed])
        row = UsageRow("2026-11-25", "k", "t", "m/x", requests=2, prompt_tokens=10, output_tokens=5, cost_micro=7)
        batch = UsageBatch("r1", 1, (row,), (InFlightCount("2026-11-25", "k", "t", "m/x", 3),))
        await store.add_usage(batch)
        await store.add_usage(batch)
        assert await store.usage(UsageQuery()) == [row]
        assert await store.end_source("r1") == 3
        assert await store.end_source("r1") == 0
        (total,) = await store.usage(UsageQuery(by=()))
        assert (total.unsettled, total.requests) == (3, 2)
        for scope in ("key:k", "tenant:t", "model:t/m/x"):
            assert await store.used(scope, "2026-11-25") == Used(5, 15, 7)
        assert await store.used("key:z", "2026-11-25") == Used()

    asyncio.run(main())
