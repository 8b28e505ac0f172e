"""The benchmark of what requests leave in memory takes every way to end, and its slope is one."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks.residue import main


def test_the_slope_of_a_line_is_found_and_its_interval_holds_it() -> None:
    draw = random.Random(1)
    for true in (0.0, 40.0):
        points = [(made, round(5e7 + true * made + draw.gauss(0, 20_000))) for made in range(0, 100_000, 1_000)]
        low, high = main.regress(points).interval
        assert low < true < high
        assert high - low < 2.0


def test_a_wave_widens_the_interval_that_noise_of_its_size_has() -> None:
    draw = random.Random(2)
    noise = [draw.choice((-30_000, 30_000)) for _ in range(100)]
    wave = sorted(noise[:50]) + sorted(noise[50:])
    narrow, wide = (main.regress([(n * 1_000, one) for n, one in enumerate(of)]).error for of in (noise, wave))
    assert wide > 1.5 * narrow


def test_few_points_have_no_slope() -> None:
    with pytest.raises(ValueError, match="too few"):
        main.regress([(number, 0) for number in range(9)])


@pytest.mark.long
def test_requests_end_in_every_way_and_leave_nothing_in_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "REPLICA_LIVES", 100)
    router = main.Router(400)
    asyncio.run(router.run())
    assert router.ended == 400
    assert router.lost >= 1
    outcomes = router.outcomes()
    assert all(outcomes[name] for name in main.ENDS)
    assert outcomes.keys() <= {*main.ENDS, "engine_failed"}
    assert sum(outcomes.values()) == len(router.receipts.kept) == 400
    assert router.deadlines_missed
    assert router.left == {}
    assert router.tasks_left == 0
