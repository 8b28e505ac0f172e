"""The bound of an image's pixels reaches vLLM, which reads it for images that it fetches by their links."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from serve_app.engine.deployment import make_backend
from serve_app.settings import DEFAULT_MAX_IMAGE_PIXELS, ModelSettings

PIXELS = "VLLM_MAX_IMAGE_PIXELS"
ADAPTER = "serve_app.engine.vllm_adapter.engine"


def bound_of(settings: ModelSettings, **operator: str) -> str:
    """What vLLM reads when an engine of this model starts. `operator`: variables that are set already."""
    seen = list[str]()

    def start(*_: object) -> None:
        seen.append(os.environ[PIXELS])

    adapter = SimpleNamespace(VllmEngine=start)
    with mock.patch.dict(os.environ, operator), mock.patch.dict(sys.modules, {ADAPTER: adapter}):
        if PIXELS not in operator:
            os.environ.pop(PIXELS, None)
        make_backend(settings)
    return seen[0]


@pytest.mark.parametrize(("given", "bound"), [({}, DEFAULT_MAX_IMAGE_PIXELS), ({"max_image_pixels": 1234}, 1234)])
def test_the_setting_is_set_before_vllm_is_imported(given: dict[str, int], bound: int) -> None:
    assert bound_of(ModelSettings.model_validate({"name": "m"} | given)) == str(bound)


def test_what_the_operator_has_set_stays() -> None:
    assert bound_of(ModelSettings(name="m", max_image_pixels=1234), VLLM_MAX_IMAGE_PIXELS="99") == "99"
