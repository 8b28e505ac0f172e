"""What an engine replica, a router and the quota actor have once they are up is no work of the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray

from serve_app.engine import deployment
from serve_app.engine.simulated import SimulatedEngine
from serve_app.ray_adapter import freeze_heap
from tests.fakes.engines import FakeCluster, run


@pytest.fixture
def as_actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process counts as an actor's."""
    before = gc.get_threshold()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_actor_id=lambda: "actor"))
    yield
    gc.set_threshold(*before)


HEAP = 50_000  # objects; what pytest has imported is frozen already (tests/conftest.py)


def tracked() -> int:
    """Objects that a full collection walks."""
    return len(gc.get_objects())


@pytest.mark.usefixtures("as_actor")
def test_a_full_collection_walks_nothing_that_was_there_before() -> None:
    heap: list[list[int]] = [[] for _ in range(HEAP)]
    before = tracked()
    assert before > HEAP
    freeze_heap()
    assert len(heap) == HEAP
    assert gc.get_freeze_count() > 0.9 * before
    assert tracked() < 0.01 * before


@pytest.mark.usefixtures("as_actor")
def test_a_dead_cycle_is_freed_and_not_frozen() -> None:
    class Node: ...

    gc.disable()
    try:
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        seen = weakref.ref(node)
        del node
        assert seen() is not None
        freeze_heap()
        assert seen() is None
    finally:
        gc.enable()


def test_a_process_that_is_no_actor_keeps_its_heap_as_it_is() -> None:
    heap: list[list[int]] = [[] for _ in range(HEAP)]
    before = gc.get_freeze_count()
    freeze_heap()
    assert len(heap) == HEAP
    assert gc.get_freeze_count() < before + HEAP, "what was frozen before may have died since"


def test_an_engine_replica_freezes_its_heap_once_its_engine_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    async def scenario(cluster: FakeCluster) -> None:
        started: list[str] = []
        start = SimulatedEngine.start

        async def noted(engine: SimulatedEngine) -> object:
            info = await start(engine)
            started.append(info.model)
            return info

        monkeypatch.setattr(SimulatedEngine, "start", noted)
        monkeypatch.setattr(deployment, "freeze_heap", lambda: calls.append(bool(started)))
        await cluster.add("r1")

    run(scenario)
    assert calls == [True]
