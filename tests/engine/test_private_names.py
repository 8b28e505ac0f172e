"""The private names of vLLM that continuing a stream needs are in the installed release: one that has moved fails here
by its name, and at an engine's start it turns the continuing off, and nothing else."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from serve_app.engine.vllm_adapter import continuing, private_names, produced_tokens
from serve_app.engine.vllm_adapter.private_names import (
    AUDIO_NAMES,
    END_NAMES,
    ENGINE_NAMES,
    MESSAGE_NAMES,
    NAMES,
    RENDER_NAMES,
    SCORING_NAMES,
    SPEECH_NAMES,
    TOOL_NAMES,
    PrivateName,
    missing,
)
from tests.requires import requires

requires("vllm")


@pytest.mark.parametrize(
    "name",
    [*NAMES, *SCORING_NAMES, *RENDER_NAMES, *TOOL_NAMES, *MESSAGE_NAMES, *SPEECH_NAMES, *AUDIO_NAMES, *END_NAMES],
    ids=lambda name: f"{name}:{','.join(name.parts)}",
)
def test_a_private_name_is_where_it_was(name: PrivateName) -> None:
    assert missing([name]) == []


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        (PrivateName("vllm.no_such_module", "x"), "vllm.no_such_module.x"),
        (PrivateName("vllm.v1.request", "Request.no_such"), "vllm.v1.request.Request.no_such"),
        (PrivateName("vllm.v1.request", "Request", ("no_such",)), "vllm.v1.request.Request: no_such"),
        (PrivateName("vllm.v1.core.sched.utils", "check_stop", ("x",)), "vllm.v1.core.sched.utils.check_stop: x"),
    ],
)
def test_a_name_that_has_moved_is_reported(name: PrivateName, lacking: str) -> None:
    assert missing([name]) == [lacking]


@pytest.mark.parametrize("module", [continuing, produced_tokens])
def test_the_names_that_are_imported_are_listed(module: ModuleType) -> None:
    listed = {(name.module, name.path.split(".")[0]) for name in NAMES}
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ImportFrom)]
    used = {(node.module, name.name) for node in imports if str(node.module).startswith("vllm") for name in node.names}
    assert used
    assert used <= listed


def test_the_attributes_of_a_running_request_that_are_read_are_listed() -> None:
    """`continuing.produced` reads them where nothing is imported."""
    listed = {part for name in NAMES for part in name.parts}
    (function,) = ast.parse(inspect.getsource(continuing.produced)).body
    attributes = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in attributes if ast.unparse(node).startswith(("state.", "one.", "llm."))}
    assert {"external_req_id", "detokenizer", "output_token_ids", "num_prompt_logprobs"} <= read
    assert read - {"values"} <= listed


def engine(*, has_engine_half: bool = True, **config: Any) -> Any:
    async def call_utility_async(method: str) -> bool:
        if not has_engine_half:
            raise Exception(f"EngineCore has no {method}")  # noqa: TRY002 - as vLLM passes it on
        return True

    given: dict[str, Any] = {
        "observability_config": SimpleNamespace(otlp_traces_endpoint=None), "speculative_config": None,
        "device_config": SimpleNamespace(device_type="cpu"), "use_v2_model_runner": False,
        "parallel_config": SimpleNamespace(distributed_executor_backend=None),
    } | config  # fmt: skip
    core = SimpleNamespace(call_utility_async=call_utility_async, add_request_async=None)
    return SimpleNamespace(vllm_config=SimpleNamespace(**given), engine_core=core)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left patched after the test."""
    for name in (*private_names.CLOCKS, *private_names.IDS, private_names.MERGE):
        monkeypatch.setattr(f"{name.module}.{name.path}", getattr(importlib.import_module(name.module), name.path))


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"has_engine_half": False}, "no engine half"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"observability_config": SimpleNamespace(otlp_traces_endpoint="x")}, "tracing"),
        ({"device_config": SimpleNamespace(device_type="cuda")}, "model runner V1"),
        ({"parallel_config": SimpleNamespace(distributed_executor_backend="ray")}, "Ray's workers"),
    ],
)
def test_an_engine_that_cannot_continue_says_why(
    changed: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert not asyncio.run(continuing.prepare(engine(**changed)))
    assert why in caplog.text
    assert asyncio.run(continuing.prepare(engine()))


def test_a_name_that_has_moved_turns_the_continuing_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    monkeypatch.delattr("vllm.v1.structured_output.StructuredOutputManager._create_grammar")
    before = Request.from_engine_core_request
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert not asyncio.run(continuing.prepare(engine()))
        produced_tokens.install()
    assert caplog.text.count("StructuredOutputManager._create_grammar") == 2
    assert Request.from_engine_core_request == before
    assert not hasattr(EngineCore, produced_tokens.ENGINE_HALF)
    assert set(ENGINE_NAMES) <= set(NAMES)
