"""`model` of an answer, where the client knows the model by another name: vLLM's serving objects ask for it once a
request, in the request's own task."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

shown_model: ContextVar[str] = ContextVar("shown_model", default="")  # of the request; empty: the model's own name


def install(models: Any) -> None:
    """Show the name that the client sent. `models`: vLLM's `OpenAIServingModels`."""
    own = models.model_name

    def model_name(lora_request: Any = None) -> str:
        return shown_model.get() or str(own(lora_request))

    models.model_name = model_name
