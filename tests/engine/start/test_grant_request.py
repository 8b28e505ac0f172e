"""Where an engine's ranks are said to be: on the device Ray gave, on this node, or on the nodes of its bundles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.core.memory import Hold, Rank
from serve_app.engine.start import grant_request
from serve_app.engine.start.grant_request import GrantRequest
from serve_app.engine.start.memory_size import GIB
from serve_app.settings.settings import ModelSettings


@pytest.fixture(autouse=True)
def ray_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is on node `here`, and Ray gave it GPU 3."""
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(grant_request.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(grant_request.ray, "get_gpu_ids", lambda: [3])


def ranks(*nodes: str, platform: Any = "gpu", **settings: Any) -> tuple[Rank, ...]:
    actor: Any = None
    return GrantRequest(ModelSettings(name="m", **settings), platform, actor).ranks(nodes)


def test_a_whole_gpu_is_the_one_that_ray_gave() -> None:
    assert ranks(gpus_per_rank=1.0) == (Rank("here", 3),)


def test_a_share_of_a_gpu_is_where_the_ledger_puts_it() -> None:
    assert ranks(gpus_per_rank=0.5) == (Rank("here"),)


def test_ranks_without_gpus_share_the_nodes_memory() -> None:
    assert ranks(platform="cpu", tensor_parallel_size=4) == (Rank("here"),)


def test_a_tensor_parallel_group_is_on_its_node_and_the_ledger_chooses_the_devices() -> None:
    assert ranks("there", "there", tensor_parallel_size=2) == (Rank("there"), Rank("there"))
    assert ranks(tensor_parallel_size=2) == (Rank("here"), Rank("here"))


def test_the_stages_of_a_pipeline_are_on_the_nodes_of_their_bundles() -> None:
    found = ranks("a", "b", tensor_parallel_size=2, pipeline_parallel_size=2)
    assert found == (Rank("a"), Rank("a"), Rank("b"), Rank("b"))


class Actor:
    """The quota actor: two GPUs of 80 on `a`, 2 of them nobody's, one of 40 on `b`; counts how often it is asked."""

    def __init__(self, away: bool = False) -> None:
        self.asked = 0
        self._away = away

    def devices(self, timeout_s: float) -> dict[str, tuple[int, int]]:
        self.asked += 1
        if self._away:
            raise TimeoutError
        return {"a/0": (80, 78), "a/1": (80, 78), "b/0": (40, 38)}


@pytest.fixture
def request_of() -> Callable[..., tuple[GrantRequest, Actor]]:
    def made(platform: Any = "gpu", away: bool = False, **settings: Any) -> tuple[GrantRequest, Actor]:
        actor: Any = Actor(away)
        return GrantRequest(ModelSettings(name="m", **settings), platform, actor), actor

    return made


def share_of(request: GrantRequest, device: str) -> float:
    """The share of the device that vLLM is told to take, with a grant of 40."""
    return request.granted_settings(Hold(device, 40), 1).gpu_memory_utilization


def test_the_actor_is_asked_once_for_what_the_devices_have(
    request_of: Callable[..., tuple[GrantRequest, Actor]], tmp_path: Path
) -> None:
    found, actor = request_of(path=str(tmp_path))
    assert found.smallest_device_bytes((Rank("a"), Rank("a"))) == 78
    assert found.smallest_device_bytes((Rank("a"), Rank("b"))) == 38
    assert share_of(found, "a/1") == 0.5
    assert share_of(found, "c/0") == 0.9, "nothing is known of it, and the setting holds"
    assert actor.asked == 1


def test_nobody_is_asked_for_what_the_settings_say(
    request_of: Callable[..., tuple[GrantRequest, Actor]], tmp_path: Path
) -> None:
    found, actor = request_of("cpu", memory_gb=8, path=str(tmp_path))
    assert found.smallest_device_bytes((Rank("a"),)) is None
    assert found.granted_settings(Hold("a/0", 8 * GIB), 1).gpu_memory_utilization == 0.9
    assert actor.asked == 0


def test_while_the_actor_is_away_nothing_is_known(
    request_of: Callable[..., tuple[GrantRequest, Actor]], tmp_path: Path
) -> None:
    found, _ = request_of(away=True, path=str(tmp_path))
    assert (found.smallest_device_bytes((Rank("a"),)), share_of(found, "a/0")) == (None, 0.9)
