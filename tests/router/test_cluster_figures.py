"""What the quota actor, Serve's controller, the store and the router's keys know, as metrics."""

from __future__ import annotations

from typing import Any

from serve_app.core.batches import RowCounts
from serve_app.names import deployment_of
from serve_app.router.metrics import ClusterAnswers, cluster_families, passed_on
from serve_app.store import StoreFigures

MODELS = {"org/m": None, "fixed": 2}


def shown(**answers: Any) -> dict[tuple[str, ...], float]:
    """Samples by name and values of labels."""
    families = cluster_families(ClusterAnswers(**answers), MODELS, wall=0.0).collect()
    return {
        (sample.name.removeprefix("serve_app_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_replicas_wanted_have_their_reason_and_those_of_a_fixed_number_are_it() -> None:
    decisions = {
        deployment_of("org/m"): {"wanted": 3, "target": 1, "cause": "load"},
        deployment_of("removed"): {"wanted": 9, "target": 9, "cause": "load"},
    }
    found = shown(decisions=decisions)
    assert {labels: value for labels, value in found.items() if labels[0].startswith("replicas")} == {
        ("replicas_wanted", "org/m"): 3,
        ("replicas_target", "org/m"): 1,
        ("replicas_wanted_reason", "org/m", "load"): 1,
        ("replicas_wanted", "fixed"): 2,
        ("replicas_target", "fixed"): 2,
        ("replicas_wanted_reason", "fixed", "fixed"): 1,
    }


def test_a_controller_that_does_not_answer_leaves_what_follows_the_load_out() -> None:
    found = shown()
    assert found["up", "controller"] == 0
    assert [labels for labels in found if labels[0] == "replicas_wanted"] == [("replicas_wanted", "fixed")]


def test_rows_of_models_that_are_not_served_are_one_series_however_clients_name_them() -> None:
    rows = {f"made-up-{number}": RowCounts(failed=1) for number in range(1000)}
    found = shown(store=StoreFigures([], {"fixed": RowCounts(1, 2, 3, 4), **rows}, 4096))
    by_model = {labels[1:]: value for labels, value in found.items() if labels[0] == "batch_model_rows"}
    assert by_model == {
        ("fixed", "waiting"): 1, ("fixed", "running"): 2, ("fixed", "completed"): 3, ("fixed", "failed"): 4,
        ("other", "waiting"): 0, ("other", "running"): 0, ("other", "completed"): 0, ("other", "failed"): 1000,
    }  # fmt: skip
    assert found[("store_bytes",)] == 4096


def test_routers_that_are_wanted_are_what_the_configuration_says() -> None:
    assert shown(routers=3)[("routers_wanted",)] == 3


def test_keys_are_counted_by_source_and_state() -> None:
    assert shown(keys={("stored", "revoked"): 7})["keys", "stored", "revoked"] == 7


def test_a_node_whose_haproxy_does_not_answer_is_seen() -> None:
    assert shown(proxies={"n1": "", "n2": None})["up", "haproxy"] == 0
    assert shown(proxies={"n1": ""})["up", "haproxy"] == shown(proxies={})["up", "haproxy"] == 1


def test_a_family_of_several_engines_is_described_once() -> None:
    first = {"vllm:a": (b"# TYPE vllm:a gauge\n", b'vllm:a{replica="1"} 1\n')}
    second = {
        "vllm:b": (b"# TYPE vllm:b gauge\n", b'vllm:b{replica="2"} 3\n'),
        "vllm:a": (b"# TYPE vllm:a gauge\n", b'vllm:a{replica="2"} 2\n'),
    }
    assert passed_on([first, {}, second]) == (
        b'# TYPE vllm:a gauge\nvllm:a{replica="1"} 1\nvllm:a{replica="2"} 2\n'
        b'# TYPE vllm:b gauge\nvllm:b{replica="2"} 3\n'
    )
