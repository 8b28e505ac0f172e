"""The table of metrics, and what a router shows of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from serve_app.engine.own_metrics import OwnMetrics
from serve_app.router.metrics import engine_families
from serve_app.router.metrics.table import TABLE, EngineFigure
from serve_app.transport import EngineLoad
from tests.fakes.asgi_client import BATCH_KEY, ask, cancel, running, started
from tests.fakes.engines import FakeCluster, model, run

OLD = {
    "serve_app_refused": "serve_app_refusals_total",
    "serve_app_placed": "serve_app_placements_total",
    "serve_app_ejections": "serve_app_replica_ejections_total",
    "serve_app_unread_ended": "serve_app_slow_clients_total",
}
FIELDS = msgspec.structs.fields(EngineLoad)
LOAD = EngineLoad(*range(1, 1 + len(FIELDS)))


def samples(text: str) -> Mapping[str, float]:
    """The sum of each name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_no_two_metrics_are_one_family_of_openmetrics() -> None:
    names = [row.name for row in TABLE]
    assert len(set(names)) == len(names)
    assert [name for name in names if name.endswith(("_total", "_bucket", "_sum", "_count", "_created"))] == []


def test_an_old_metric_names_the_one_that_has_taken_its_place() -> None:
    known = {row.sample_name for row in TABLE if not row.is_old}
    reported = {row.sample_name: row.help for row in TABLE if row.is_old}
    assert {name: reported[name] for name in OLD} == OLD
    assert set(OLD.values()) <= known


def test_each_figure_of_a_load_is_a_metric_of_its_own_type() -> None:
    families = engine_families({"m": {"r": LOAD}})
    shown = samples(generate_latest(families).decode())
    rows = {figure.name.lower(): figure.value for figure in EngineFigure if not figure.value.is_old}
    assert set(rows) == {field.name for field in FIELDS}
    assert {name: shown[row.sample_name] for name, row in rows.items()} == msgspec.structs.asdict(LOAD)
    counted = {name for name, row in rows.items() if row.type == "counter"}
    assert counted == {
        "steps", "generated_tokens", "prompt_tokens", "prefilled_tokens", "preemptions", "sequence_steps", "batches",
        "batched_requests",
    }  # fmt: skip


def test_the_old_metric_of_engines_still_has_all_figures() -> None:
    (old,) = (family for family in engine_families({"m": {"r": LOAD}}).collect() if family.name == "serve_app_engine")
    labels = {"model": "m", "replica": "r"}
    assert [sample.labels.items() >= labels.items() for sample in old.samples] == [True] * len(FIELDS)
    assert {sample.labels["figure"]: sample.value for sample in old.samples} == msgspec.structs.asdict(LOAD)


def test_a_scrape_passes_on_what_engines_count_themselves_with_model_and_replica() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2")
        steps = CounterMetricFamily("vllm:steps", "Steps.", labels=("engine",))
        steps.add_metric(("0",), 3)
        for name in ("r1", "r2"):
            engine = cluster[name].engine
            engine.own_metrics = OwnMetrics({"model": "m", "replica": name})
            engine.backend.own_metrics = lambda: [steps]  # type: ignore[method-assign]
        for accept, parse in (("", text_string_to_metric_families), ("application/openmetrics-text", openmetrics)):
            text = (await client.get("/metrics", headers={"Accept": accept})).body.decode()
            (family,) = (one for one in parse(text) if one.name == "vllm:steps")
            found = [(one.labels["replica"], one.labels["engine"], one.value) for one in family.samples]
            assert found == [("r1", "0", 3), ("r2", "0", 3)]
        cluster.kill("r2", reported=False)  # it is missing, and nothing else
        text = (await client.get("/metrics")).body.decode()
        assert text.count("vllm:steps_total{") == 1
        assert "serve_app_slots" in text

    run(scenario)


def test_refusals_are_counted_by_tenant_class_and_reason_under_the_old_name_too() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", admission={"max_queued": 0})
        task, _ = await running(client)
        for key in (BATCH_KEY, BATCH_KEY):
            assert (await client.post(ask("no room"), key=key)).status == 429
        text = (await client.get("/metrics")).body.decode()
        labels = ("tenant", "priority", "reason")
        assert client.figures("serve_app_refusals_total", *labels) == {("batch", "low", "queue_full"): 2}
        assert client.figures("serve_app_refused", "reason") == {("queue_full",): 2}
        assert "_created" not in text
        await cancel(task)

    run(scenario, model(slots=1))


def test_a_scrape_shows_every_metric_of_the_table_and_no_other() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        assert (await client.post(ask("a"))).status == 200
        families = text_string_to_metric_families((await client.get("/metrics")).body.decode())
        found = {family.name: family.type for family in families}
        assert found == {row.name: row.type for row in TABLE}

    run(scenario)
