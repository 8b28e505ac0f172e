"""What vLLM makes of bodies that it does not foresee: an error of the request, or its answer."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.datastructures import State

from serve_app.engine.vllm_adapter import serving
from serve_app.transport import Submit
from serve_app.types import Operation


@pytest.mark.parametrize("part", [{"type": "text", "text": 5}, {"type": "none"}, 5, None])
def test_a_part_of_a_wrong_type_to_embed_is_an_error_of_validation(part: Any) -> None:
    """vLLM reads the parts lazily; pydantic panics if the adapter that made them is gone by then."""

    async def embed(request: Any, _: Any) -> Any:
        gc.collect()
        read = [list(message["content"]) for message in request.messages]
        return SimpleNamespace(body=repr(read).encode())

    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    submit = Submit(1, "r", Operation.EMBEDDING, body)
    with pytest.raises(ValidationError):
        asyncio.run(serving.answer(SimpleNamespace(), State({"serving_embedding": embed}), submit, False))  # type: ignore[arg-type]
