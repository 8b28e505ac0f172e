"""vLLM gives the variables of the first rank's node to ranks on other nodes (docs/how-to/use-a-hub-and-caches.md)."""

from __future__ import annotations

import pytest

from tests.requires import requires

requires("vllm")

GIVEN = {"HF_TOKEN": "hf_secret", "HF_HOME": "/shared/models", "HF_HUB_OFFLINE": "1"}


def test_the_model_cache_and_the_token_go_to_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor.ray_env_utils import get_driver_env_vars
    from vllm.v1.executor.ray_executor_v2 import WORKER_SPECIFIC_ENV_VARS

    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    assert get_driver_env_vars(WORKER_SPECIFIC_ENV_VARS).items() >= GIVEN.items()
