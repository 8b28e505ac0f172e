"""The metrics that an engine itself counts, as its part of a scrape."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from serve_app.engine.own_metrics import MAX_BYTES, OwnMetrics

LABELS = {"model": "org/m", "replica": "r1"}


def families() -> list[Metric]:
    registry = CollectorRegistry()
    Counter("vllm:steps", "Steps.", ("engine",), registry=registry).labels("0").inc(3)
    Histogram("vllm:wait_seconds", "A\nwait.", ("engine",), registry=registry, buckets=(1.0,)).labels("0").observe(2.0)
    Gauge("vllm:config_info", 'With "quotes".', ("engine", "path"), registry=registry).labels("0", 'a"b\n# c').set(1)
    return list(registry.collect())


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_each_sample_has_the_model_and_the_replica_and_none_is_a_time_of_creation(is_openmetrics: bool) -> None:
    texts = OwnMetrics(LABELS).texts(families(), is_openmetrics=is_openmetrics)
    assert set(texts) == {"vllm:steps", "vllm:wait_seconds", "vllm:config_info"}
    text = b"".join(part for parts in texts.values() for part in parts).decode()
    parse = openmetrics_families if is_openmetrics else text_string_to_metric_families
    read = list(parse(text + ("# EOF\n" if is_openmetrics else "")))
    samples = [sample for family in read for sample in family.samples]
    assert {family.type for family in read} == {"counter", "histogram", "gauge"}
    assert all(LABELS.items() <= sample.labels.items() for sample in samples)
    assert {sample.name for sample in samples} == {
        "vllm:steps_total", "vllm:wait_seconds_bucket", "vllm:wait_seconds_count", "vllm:wait_seconds_sum",
        "vllm:config_info",
    }  # fmt: skip
    assert [sample.labels["path"] for sample in samples if "path" in sample.labels] == ['a"b\n# c']


def test_comments_and_samples_are_apart_so_that_engines_can_be_joined() -> None:
    comments, samples = OwnMetrics(LABELS).texts(families(), is_openmetrics=False)["vllm:steps"]
    assert comments == b"# HELP vllm:steps_total Steps.\n# TYPE vllm:steps_total counter\n"
    assert samples == b'vllm:steps_total{engine="0",model="org/m",replica="r1"} 3.0\n'


def test_what_is_too_long_is_left_out_as_a_whole_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    many = Gauge("vllm:lora_info", "Adapters.", ("adapter",), registry=registry)
    for number in range(10_000):
        many.labels(f"adapter-{number}").set(1)
    metrics = OwnMetrics(LABELS)
    for _ in range(2):
        texts = metrics.texts([*registry.collect(), *families()], is_openmetrics=False)
        assert "vllm:lora_info" not in texts
        assert len(texts) == len(families())
        assert sum(len(part) for parts in texts.values() for part in parts) <= MAX_BYTES
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "vllm:lora_info" in caplog.text


def test_families_that_fit_are_there_though_one_does_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    texts = OwnMetrics(LABELS, max_bytes=200).texts(families(), is_openmetrics=False)
    assert set(texts) == {"vllm:steps"}
    assert "vllm:config_info, vllm:wait_seconds" in caplog.text
