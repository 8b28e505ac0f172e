"""vLLM's own metrics: what its logger counts at a step is what is passed on, at less cost."""

from __future__ import annotations

import threading
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from serve_app.engine.vllm_adapter.own_metrics import PENDING, CountedLater, VllmMetrics, families

BOUNDS = (0.01, 0.1, 1.0)
NOT_THERE = ("speculative_config", "kv_transfer_config", "ec_transfer_config", "lora_config", "watermark_config")


def configuration() -> MagicMock:
    """What the logger reads of vLLM's configuration."""
    config = MagicMock()
    config.observability_config.configure_mock(
        show_hidden_metrics=False, kv_cache_metrics=False, enable_mfu_metrics=False, custom_histogram_buckets=None
    )
    config.model_config.configure_mock(served_model_name="m", max_model_len=4096, is_diffusion=False)
    config.configure_mock(**dict.fromkeys(NOT_THERE))
    return config


def counted(logger_class: type[PrometheusStatLogger]) -> dict[tuple[str, ...], float]:
    """The samples after a step of three sequences, by name and labels."""
    try:
        logger = logger_class(configuration(), [0])
        step = IterationStats()
        step.num_generation_tokens = 3
        step.inter_token_latencies_iter = [0.01, 0.0100001, 90.0]
        step.time_to_first_tokens_iter = [0.5]
        logger.record(SchedulerStats(num_running_reqs=3), step)
        samples = [sample for family in families() for sample in family.samples]
    finally:
        unregister_vllm_metrics()
    return {
        (one.name, *map(str, one.labels.items())): one.value for one in samples if not one.name.endswith("_created")
    }


def test_the_samples_are_those_of_vllms_own_logger() -> None:
    ours = counted(VllmMetrics)
    assert ours == counted(PrometheusStatLogger)
    assert len(ours) > 200
    assert all(name.startswith("vllm:") for name, *_ in ours)


@given(st.lists(st.floats(0, 10) | st.sampled_from(BOUNDS), max_size=50))
def test_values_that_are_counted_later_are_in_the_same_buckets(values: list[float]) -> None:
    registries = {kind: CollectorRegistry() for kind in (CountedLater, Histogram)}
    histograms = [
        kind("h", "H.", ("engine",), buckets=BOUNDS, registry=registry).labels("0")
        for kind, registry in registries.items()
    ]
    for value in values:
        for histogram in histograms:
            histogram.observe(value)
    # without the sums, which are added in another order, and the times of creation
    found, wanted = (
        [line for line in generate_latest(one).splitlines() if b"_bucket" in line or b"_count" in line]
        for one in registries.values()
    )
    assert found == wanted


def test_no_value_is_lost_while_a_scrape_reads() -> None:
    registry = CollectorRegistry()
    histogram = CountedLater("h", "H.", buckets=BOUNDS, registry=registry)
    total = 20 * PENDING
    over = threading.Event()

    def scrape() -> None:
        while not over.is_set():
            generate_latest(registry)

    reader = threading.Thread(target=scrape)
    reader.start()
    for _ in range(total):
        histogram.observe(0.5)
    over.set()
    reader.join()
    assert registry.get_sample_value("h_count") == total
    assert registry.get_sample_value("h_sum") == pytest.approx(total / 2)


def test_values_that_wait_to_be_counted_are_bounded() -> None:
    histogram = CountedLater("h", "H.", buckets=BOUNDS, registry=CollectorRegistry())
    for _ in range(3 * PENDING + 1):
        histogram.observe(0.5)
    assert len(histogram.pending) == 1
