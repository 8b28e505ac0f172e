"""What the garbage collector does in the processes of actors."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from serve_app.ray_adapter import freeze_heap, heap


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The collector of the tests themselves."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("is_actor", [True, False])
def test_an_actor_freezes_its_heap_and_collects_young_objects_more_rarely(
    monkeypatch: pytest.MonkeyPatch, is_actor: bool
) -> None:
    monkeypatch.setattr(heap, "is_actor", lambda: is_actor)
    before = gc.get_threshold()
    frozen = gc.get_freeze_count()
    freeze_heap()
    assert (gc.get_freeze_count() > frozen) is is_actor
    assert gc.get_threshold() == ((heap.YOUNG_OBJECTS, *before[1:]) if is_actor else before)
