"""What vLLM tells of its steps, as live figures of an engine."""

from __future__ import annotations

from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats

from serve_app.engine.vllm_adapter.recorded import LiveStats


def test_what_is_prefilled_is_what_was_looked_up_less_the_hits() -> None:
    stats = LiveStats()
    cache = PrefixCacheStats()
    cache.record(num_tokens=100, num_hits=64, preempted=False)
    cache.record(num_tokens=50, num_hits=0, preempted=True)  # by vLLM's own preemption
    stats.record(SchedulerStats(prefix_cache_stats=cache), IterationStats())
    stats.record(SchedulerStats(), None)
    assert stats.load.prefilled_tokens == 36 + 50
    assert stats.load.steps == 2


def test_only_a_step_with_a_first_token_tells_so() -> None:
    steps: list[int] = []
    stats = LiveStats(lambda: steps.append(stats.load.steps))
    first = IterationStats()
    first.time_to_first_tokens_iter.append(0.1)
    for reported in (IterationStats(), first, None, IterationStats()):
        stats.record(SchedulerStats(), reported)
    assert steps == [2]
