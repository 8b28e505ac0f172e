"""Batches as each strategy forms them, by examples."""

from __future__ import annotations

import pytest

from serve_app.core.batching import (
    FIRST_SIZE,
    MIN_SIZE,
    PRESETS,
    RECENT,
    Batcher,
    BatchItem,
    BatchPolicy,
    RequestBatch,
    Sizing,
    Trigger,
    padding_ratio,
)
from serve_app.core.estimate import LengthRule


def item(name: object, prompt: int = 10, output: int = 0) -> BatchItem:
    return BatchItem(str(name), prompt, output)


def arrive(batcher: Batcher, names: range, now: float = 0.0, prompt: int = 10) -> list[RequestBatch]:
    return [batch for name in names for batch in batcher.on_arrive(item(name, prompt), now)]


def ids(batch: RequestBatch) -> list[str]:
    return [one.item_id for one in batch.items]


def end(batcher: Batcher, batch: RequestBatch, now: float) -> list[RequestBatch]:
    """The whole batch ends."""
    return [found for one in batch.items for found in batcher.on_end(one.item_id, now)]


def test_a_static_batch_without_a_wait_starts_when_it_is_full_and_no_sooner() -> None:
    batcher = Batcher(BatchPolicy(8))
    assert arrive(batcher, range(7)) == []
    assert batcher.next_due() is None
    assert batcher.on_tick(1e6) == []
    (batch,) = batcher.on_arrive(item(7), 1e6)
    assert (ids(batch), batch.trigger) == ([str(n) for n in range(8)], Trigger.FULL)
    assert batch.waits_s == (*[1e6] * 7, 0.0)


def test_a_batch_that_is_not_full_starts_when_its_oldest_request_has_waited_long_enough() -> None:
    batcher = Batcher(BatchPolicy(32, 0.1))
    batcher.on_arrive(item("a"), 1.0)
    batcher.on_arrive(item("b"), 1.09)
    assert batcher.next_due() == pytest.approx(1.1)
    assert batcher.on_tick(1.0999) == []
    (batch,) = batcher.on_tick(batcher.next_due() or 0.0)
    assert (ids(batch), batch.trigger) == (["a", "b"], Trigger.WAIT)


def test_the_next_batch_starts_when_the_last_request_of_the_one_before_has_ended() -> None:
    batcher = Batcher(BatchPolicy(2))
    (first,) = arrive(batcher, range(2))
    assert arrive(batcher, range(2, 5)) == []
    assert batcher.next_due() is None
    assert batcher.on_end("0", 1.0) == []
    (second,) = batcher.on_end("1", 2.0)
    assert (ids(first), ids(second)) == (["0", "1"], ["2", "3"])


def test_a_request_that_waited_out_its_time_behind_a_batch_goes_with_the_next_one_at_once() -> None:
    batcher = Batcher(BatchPolicy(2, 0.1))
    (first,) = arrive(batcher, range(2))
    batcher.on_arrive(item("late"), 0.5)
    (second,) = end(batcher, first, 3.0)
    assert (ids(second), second.trigger, second.waits_s) == (["late"], Trigger.WAIT, (2.5,))


def test_without_more_requests_to_come_what_waits_starts_at_once() -> None:
    batcher = Batcher(BatchPolicy(8))
    arrive(batcher, range(3))
    (batch,) = batcher.close(0.0)
    assert (ids(batch), batch.trigger) == (["0", "1", "2"], Trigger.CLOSED)
    with pytest.raises(ValueError, match="closed"):
        batcher.on_arrive(item("more"), 0.0)


def test_a_token_budget_fills_a_batch_and_counts_outputs_only_where_it_should() -> None:
    batcher = Batcher(BatchPolicy(32, 1.0, 100))
    assert batcher.on_arrive(item("a", 60, 500), 0.0) == []
    (batch,) = batcher.on_arrive(item("b", 50, 500), 0.0)
    assert (ids(batch), batch.trigger) == (["a"], Trigger.FULL)
    with_output = Batcher(BatchPolicy(32, 1.0, 100, counts_output=True))
    assert with_output.on_arrive(item("a", 40, 30), 0.0) == []
    (batch,) = with_output.on_arrive(item("b", 10, 20), 0.0)
    assert ids(batch) == ["a", "b"]


def test_a_request_above_the_token_budget_runs_alone() -> None:
    batcher = Batcher(BatchPolicy(32, 1.0, 100))
    (batch,) = batcher.on_arrive(item("giant", 1_000), 0.0)
    assert ids(batch) == ["giant"]


def test_a_sorted_batch_has_the_oldest_request_and_those_nearest_to_its_length() -> None:
    batcher = Batcher(BatchPolicy(3, by_length=True))
    (first,) = [batch for name, length in enumerate((1, 2, 3)) for batch in batcher.on_arrive(item(name, length), 0.0)]
    for name, length in (("old", 50), ("short", 2), ("near", 48), ("long", 900), ("nearer", 51)):
        batcher.on_arrive(item(name, length), 1.0)
    (second,) = end(batcher, first, 2.0)
    assert ids(second) == ["old", "near", "nearer"]


def test_predicted_sizes_begin_with_the_first_size_and_shrink_to_the_least() -> None:
    batcher = Batcher(BatchPolicy(128, sizing=Sizing.RECENT_BATCHES))
    batches = arrive(batcher, range(500))
    while batches[-1].items and len(batches) < 20:
        batches += end(batcher, batches[-1], 1.0)
    sizes = [len(batch.items) for batch in batches]
    assert sizes[:RECENT] == [FIRST_SIZE] * RECENT
    assert sizes[RECENT] == int(0.9 * FIRST_SIZE)
    assert sizes[-1] == MIN_SIZE


def test_sizes_by_the_arrival_rate_are_what_comes_within_the_wait() -> None:
    batcher = Batcher(BatchPolicy(128, 0.1, sizing=Sizing.ARRIVAL_RATE))
    found: list[RequestBatch] = []
    for number in range(300):  # 100 a second
        now = number / 100
        while (due := batcher.next_due()) is not None and due <= now:
            found += batcher.on_tick(due)
        found += batcher.on_arrive(item(number), now)
        if found and batcher.running:
            found += end(batcher, found[-1], now)
    assert {len(batch.items) for batch in found[3:]} <= {9, 10, 11}


def test_long_prompts_make_small_batches() -> None:
    policy = BatchPolicy(64, sizing=Sizing.PROMPT_LENGTH, long_size=16, long_from=100)
    assert [len(batch.items) for batch in arrive(Batcher(policy), range(64), prompt=99)] == [64]
    assert [len(batch.items) for batch in arrive(Batcher(policy), range(64), prompt=100)] == [16]


def test_weights_fill_a_batch_with_fewer_long_requests() -> None:
    policy = BatchPolicy(64, weights=LengthRule.of_batch(64, 16, 100))
    assert [len(batch.items) for batch in arrive(Batcher(policy), range(64), prompt=99)] == [64]
    assert [len(batch.items) for batch in arrive(Batcher(policy), range(64), prompt=100)] == [16]


def test_continuous_requests_start_whenever_one_has_ended() -> None:
    batcher = Batcher(BatchPolicy(2, is_continuous=True))
    started = arrive(batcher, range(3))
    assert [ids(batch) for batch in started] == [["0"], ["1"]]
    (next_one,) = batcher.on_end("0", 1.0)
    assert (ids(next_one), batcher.running, batcher.waiting) == (["2"], 2, 0)


def test_a_cancelled_request_leaves_its_queue_or_its_batch() -> None:
    batcher = Batcher(BatchPolicy(2, 0.1))
    batcher.on_arrive(item("gone"), 0.0)
    assert batcher.on_end("gone", 0.01) == []
    assert (batcher.waiting, batcher.next_due()) == (0, None)
    (batch,) = arrive(batcher, range(2))
    batcher.on_arrive(item("next"), 0.0)
    batcher.on_end("0", 0.02)
    (after,) = batcher.on_end("1", 0.2)
    assert (ids(batch), ids(after)) == (["0", "1"], ["next"])
    assert batcher.on_end("never seen", 0.2) == []


def test_a_full_queue_says_so_and_takes_what_its_caller_does_not_refuse() -> None:
    batcher = Batcher(BatchPolicy(1, max_queued=2))
    arrive(batcher, range(3))
    assert batcher.is_queue_full
    assert batcher.on_arrive(item("accepted before"), 0.0) == []
    assert batcher.waiting == 3
    batcher.on_end("1", 0.0)
    batcher.on_end("2", 0.0)
    assert not batcher.is_queue_full


def test_an_id_that_waits_or_runs_is_refused() -> None:
    batcher = Batcher(BatchPolicy(1))
    arrive(batcher, range(2))
    for name in ("0", "1"):
        with pytest.raises(ValueError, match="already"):
            batcher.on_arrive(item(name), 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_size": 0},
        {"max_size": 1, "max_tokens": 0},
        {"max_size": 1, "max_queued": 0},
        {"max_size": 1, "max_wait_s": -1.0},
        {"max_size": 1, "max_wait_s": float("inf")},
        {"max_size": 1, "long_size": 0},
        {"max_size": 1, "sizing": Sizing.ARRIVAL_RATE},
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"below 1|max_wait_s"):
        BatchPolicy(**wrong)  # type: ignore[arg-type]


def test_padding_is_what_the_longest_adds_to_the_others() -> None:
    assert padding_ratio([10, 10, 10]) == 0.0
    assert padding_ratio([1, 3]) == pytest.approx(1 / 3)
    assert padding_ratio([]) == 0.0
    assert padding_ratio([0, 0]) == 0.0


def test_the_presets_have_the_fields_own_parameters() -> None:
    assert (PRESETS["static-8"].max_size, PRESETS["static-8"].max_wait_s) == (8, None)
    assert (PRESETS["static-32"].max_size, PRESETS["static-32"].max_wait_s) == (32, 0.1)
    dynamic = PRESETS["dynamic-32"]
    assert (dynamic.max_size, dynamic.max_wait_s, dynamic.max_tokens, dynamic.counts_output) == (32, 0.05, 8192, True)
    assert (PRESETS["dynamic-8"].max_size, PRESETS["dynamic-8"].max_wait_s) == (8, 0.05)
    assert (PRESETS["dynamic-4096"].max_tokens, PRESETS["dynamic-4096"].counts_output) == (4096, False)
    assert PRESETS["dynamic-128"].max_size == 128
    assert (FIRST_SIZE, MIN_SIZE) == (16, 8)
    aware = PRESETS["length-aware"]
    assert (aware.max_size, aware.long_size, aware.long_from) == (64, 16, 100)
