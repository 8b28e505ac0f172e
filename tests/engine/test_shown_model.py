"""An answer of vLLM has the name that its client sent, where that is not the model's own."""

from __future__ import annotations

import contextvars

from tests.requires import requires

requires("vllm")

from vllm.entrypoints.openai.models.protocol import BaseModelPath  # noqa: E402
from vllm.entrypoints.openai.models.serving import OpenAIServingModels  # noqa: E402

from serve_app.engine.vllm_adapter import shown_model  # noqa: E402


def test_each_request_is_answered_under_the_name_it_was_asked_for() -> None:
    models = OpenAIServingModels.__new__(OpenAIServingModels)
    models.base_model_paths = [BaseModelPath(name="own", model_path="/own")]
    shown_model.install(models)

    def asked(name: str) -> str:
        shown_model.shown_model.set(name)
        return models.model_name()

    assert contextvars.copy_context().run(asked, "chat") == "chat"
    assert contextvars.copy_context().run(asked, "") == "own"
    assert models.model_name() == "own"
