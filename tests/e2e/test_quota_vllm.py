"""Two real vLLM engines on a machine whose device is too small for both at full size."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from benchmarks.common.processes import title_of
from serve_app.engine.start.memory_size import estimated_need
from serve_app.engine.tiny_model import CONFIG
from serve_app.names import deployment_of
from serve_app.settings import GB, ModelSettings
from tests.e2e.changing import KEY, POLL_S, Place, place
from tests.requires import requires
from tests.waiting import Met, during, wait_until

KV_GB = 0.5
SMALL_GB = 0.25
WEIGHTS_ROOM_GB = 0.1  # the tiny model's weights are a few MB
FIXED_BYTES = estimated_need(ModelSettings(name="m", dtype="float32", max_num_seqs=8), "cpu", 0, CONFIG).fixed_bytes
DEVICE_BYTES = 2 * FIXED_BYTES + int((KV_GB + SMALL_GB + WEIGHTS_ROOM_GB) * GB)  # not for twice KV_GB
STARTED_S = 300.0  # two engines one after the other, 40 s each on two idle cores
EQUAL_S = 10.0  # the promise: after a crash the ledger equals reality
LOOK_S = 2.0  # of this test
CORE = "VLLM::EngineCore"
LOADED_S = 5.0  # of requests, while the memory is measured

Engine = dict[str, Any]
T = TypeVar("T")


def model(name: str, kv_gb: float) -> dict[str, Any]:
    return {"name": name, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "kv_cache_gb": kv_gb}


def config(*models: dict[str, Any]) -> dict[str, Any]:
    share = DEVICE_BYTES / psutil.virtual_memory().total
    return {"models": list(models), "auth": {"keys": [{"key": KEY}]}, "quota": {"host_memory_share": share}}


def until(own_place: Place, condition: Callable[[], T], goal: str) -> Met[T]:
    seen = lambda: (own_place.status(), own_place.quota())  # noqa: E731
    return wait_until(condition, STARTED_S, goal, seen=seen, poll_s=POLL_S)


def small(own_place: Place) -> bool:
    """Whether both run, and the first with its smaller KV pool."""
    found = (own_place.quota() or {"engines": []})["engines"]
    granted = {one["model"]: one["granted_bytes"] for one in found if one["state"] == "committed"}
    return len(found) == 2 and set(granted) == {"first", "second"} and granted["first"] < granted["second"]


def core_of(own_place: Place, name: str) -> int:
    """The EngineCore process of a model's one replica."""
    (replica,) = own_place.processes(deployment_of(name))
    (found,) = [one.pid for one in psutil.Process(replica).children(recursive=True) if title_of(one.pid) == CORE]
    return found


def engines(own_place: Place) -> dict[str, Engine]:
    return {one["model"]: one for one in (own_place.quota() or {"engines": []})["engines"]}


@pytest.mark.long
def test_the_second_engine_waits_until_the_first_is_smaller_and_both_stay_within_their_grants(tmp_path: Path) -> None:
    requires("linux")
    requires("vllm")
    with place(tmp_path) as own_place:
        own_place.declare(config(model("first", KV_GB)))
        until(own_place, lambda: own_place.endpoint.serves("first"), "the first starts")
        own_place.declare(config(model("first", KV_GB), model("second", KV_GB)))
        (waiting,) = until(own_place, lambda: (own_place.quota() or {}).get("waiting"), "the second waits").found
        assert (waiting["model"], waiting["state"]) == ("second", "blocked: memory")
        until(
            own_place,
            lambda: (
                [one["state"] for one in own_place.status()["models"] if one["name"] == "second"] == ["blocked: memory"]
            ),
            "the status says so",
        )
        assert own_place.endpoint.ask("first").status == 200
        assert set(engines(own_place)) == {"first"}

        own_place.declare(config(model("first", SMALL_GB), model("second", KV_GB)))
        until(own_place, lambda: own_place.endpoint.serves("first") and own_place.endpoint.serves("second"), "both run")
        until(own_place, lambda: small(own_place), "both hold what they are to have")
        assert own_place.replicas("second") == {"second": [waiting["replica"]]}, "the very one that waited"
        most: dict[str, int] = {}
        for _ in during(LOADED_S):
            for name, engine in engines(own_place).items():
                assert own_place.endpoint.ask(name, 32).status == 200
                most[name] = max(most.get(name, 0), engine["measured_bytes"])
        figures = own_place.quota()
        assert figures is not None
        granted = {name: one["granted_bytes"] for name, one in engines(own_place).items()}
        print(f"device {DEVICE_BYTES / GB:.2f} GB; granted and measured, GB: ", end="")
        print({name: (round(granted[name] / GB, 2), round(most[name] / GB, 2)) for name in granted})
        assert all(0 < most[name] <= granted[name] for name in ("first", "second"))
        assert sum(granted.values()) <= figures["total_bytes"]
        assert figures["alarms"] == []

        replica = engines(own_place)["second"]["replica"]
        os.kill(core_of(own_place, "second"), signal.SIGKILL)
        ids = lambda: {one["replica"] for one in engines(own_place).values()}  # noqa: E731
        back = wait_until(lambda: replica not in ids(), EQUAL_S + LOOK_S, "its grant is back", seen=ids)
        print(f"the grant of an engine whose EngineCore was killed was back after {back.wall_s:.1f} s")
        until(own_place, lambda: own_place.endpoint.serves("second"), "another one serves")
        assert engines(own_place)["second"]["state"] == "committed"
        assert set(engines(own_place)) == {"first", "second"}
