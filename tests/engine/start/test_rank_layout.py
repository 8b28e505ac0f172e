"""An engine starts only where its bundles are right, and ends when a node of it is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from serve_app.engine.start import rank_layout
from serve_app.engine.start.engine_args import placement
from serve_app.engine.start.rank_layout import RankLayout, verify
from serve_app.errors import ConfigError, EngineFailed
from serve_app.settings.settings import ModelSettings


def model(**changes: object) -> ModelSettings:
    return ModelSettings.model_validate({"name": "m", "path": "/models/m"} | changes)


def group(bundles: Sequence[Mapping[str, float]], nodes: Sequence[str]) -> dict[str, Any]:
    """An entry of Ray's placement group table."""
    return {"bundles": dict(enumerate(bundles)), "bundles_to_node_id": dict(enumerate(nodes))}


def given(settings: ModelSettings, nodes: Sequence[str]) -> dict[str, Any]:
    """What Ray gives for what we ask for on GPU nodes."""
    return group(placement(settings, "gpu")["placement_group_bundles"], nodes)


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [
        (model(), "a"),
        (model(tensor_parallel_size=4), "aaaa"),
        (model(tensor_parallel_size=2, pipeline_parallel_size=3), "aba"),
        (model(tensor_parallel_size=2, pipeline_parallel_size=2), "aa"),
    ],
)
def test_what_ray_gives_for_our_bundles_is_accepted(settings: ModelSettings, nodes: str) -> None:
    verify(settings, "gpu", given(settings, nodes))


def test_a_group_that_someone_let_ray_split_is_refused() -> None:
    parallel = model(tensor_parallel_size=4)
    with pytest.raises(ConfigError, match=r"split over 2 nodes.*STRICT_PACK"):
        verify(parallel, "gpu", given(parallel, "aaab"))


def test_a_pipeline_in_bundles_of_one_rank_is_refused_even_on_one_node() -> None:
    pipeline = model(tensor_parallel_size=2, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"got bundles of 1 \+ 1 \+ 1 \+ 1 GPUs, it needs 2 \+ 2"):
        verify(pipeline, "gpu", group([{"CPU": 1, "GPU": 1}] * 4, "aaaa"))


@pytest.mark.parametrize("bundles", [[{"CPU": 1.0}] * 2, []])
def test_a_configuration_built_for_cpus_is_refused_by_the_gpu_build(bundles: list[dict[str, float]]) -> None:
    with pytest.raises(ConfigError, match="CPU build"):
        verify(model(tensor_parallel_size=2), "gpu", group(bundles, "a" * len(bundles)))


def test_an_operator_may_add_other_resources_to_the_bundles() -> None:
    verify(model(), "gpu", group([{"CPU": 8, "GPU": 1, "memory": 1e9}], "a"))


def test_outside_ray_there_is_nothing_to_check() -> None:
    assert rank_layout.layout_of_this_replica(model(tensor_parallel_size=8), "gpu").nodes == ()


class Table:
    """Ray's entry of a group over two nodes, which a test changes."""

    def __init__(self, nodes: str = "ab") -> None:
        self.nodes = nodes
        self.error: Exception | None = None
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()
        self.layout = RankLayout(tuple(nodes), self.read)

    def read(self) -> dict[str, Any]:
        self.asked += 1
        self.answers.wait()
        if self.error is not None:
            raise self.error
        return group([{}] * len(self.nodes), [node.strip() for node in self.nodes])


@pytest.mark.parametrize("later", ["a ", "ac", ""])
def test_the_loss_of_a_node_that_held_a_stage_ends_the_engine(later: str) -> None:
    table = Table()

    async def scenario() -> None:
        await table.layout.check()
        table.nodes = later  # Ray has no node for the stage, or has found it another, or has forgotten the group
        with pytest.raises(EngineFailed, match=f"node {'b' if later else 'a'}, which held a part"):
            await table.layout.check()

    asyncio.run(scenario())


def test_an_engine_on_one_node_asks_nothing() -> None:
    table = Table("aaaa")
    asyncio.run(table.layout.check())
    assert table.asked == 0


def test_a_ray_that_fails_or_does_not_answer_ends_no_engine_and_is_asked_once_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_layout, "RANK_NODES_S", 0.01)
    table = Table()

    async def scenario() -> None:
        table.error = RuntimeError("no GCS")
        await table.layout.check()
        table.error = None
        table.answers.clear()
        for _ in range(3):
            await table.layout.check()
        assert table.asked == 2
        table.nodes = "ac"
        table.answers.set()
        monkeypatch.setattr(rank_layout, "RANK_NODES_S", 5.0)  # bound of what now takes no time
        with pytest.raises(EngineFailed):
            await table.layout.check()

    asyncio.run(scenario())
