"""An action of the quota actor that cannot be applied, in a router's shell."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.quota import SOON_S, FakeQuota, at_rest, fleet, refused, run, waits

SLOTS = 4


def test_an_action_that_cannot_be_applied_is_logged_with_its_request_and_ends_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": SLOTS})
        async with fleet(actor, 1) as (caller,):
            held = await caller.hold_all(SLOTS)
            asked = {name: caller.asking(name) for name in ("a", "b", "c")}
            await waits(caller, actor, *asked)
            line = caller.shared.core
            act = line.on_action
            broken = line.pending.by_request_id["b"].ticket

            def fails(action: Any, now: float) -> Any:
                if getattr(action, "request_id", "") == broken:
                    raise KeyError("batch")
                return act(action, now)

            line.on_action = fails  # type: ignore[method-assign]
            for name in held:
                caller.done(name)
            error = await refused(asked.pop("b"))
            assert (error.status, error.code, error.retry_after_s) == (503, "request_lost", 1.0)
            await asyncio.wait_for(asyncio.gather(*asked.values()), SOON_S)
            assert "request b is ended" in caplog.text
            assert "known to one side only" not in caplog.text
            for name in asked:
                caller.done(name)
            await at_rest(actor, caller)

    run(scenario)
