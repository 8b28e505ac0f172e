"""What is recognised of a start is in the installed vLLM: its messages, and the calls that begin a phase.

A rise of vLLM's version that changes one of them fails here, and not as a start that is told worse.
"""

from __future__ import annotations

import ast
import builtins
import errno
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.engine.engine_failure import NO_CAUSE, REMEDIES
from tests.requires import requires

requires("vllm")

# Where each text of an error comes from: a package's file with it in a string. Those of Python and of the system are
# made below.
FILES = {
    "gated repo": "transformers/utils/hub.py",
    "401 client error": "huggingface_hub/utils/_http.py",
    "is not a local folder and is not a valid model": "transformers/utils/hub.py",
    "repository not found": "huggingface_hub/utils/_http.py",
    "outgoing traffic has been disabled": "huggingface_hub/file_download.py",
    "couldn't connect": "transformers/utils/hub.py",
    "trust_remote_code": "vllm/transformers_utils/config.py",
    "kv cache is needed": "vllm/v1/core/kv_cache_utils.py",
    "no available memory for the cache blocks": "vllm/v1/core/kv_cache_utils.py",
    "less than desired gpu memory utilization": "vllm/v1/worker/utils.py",
    "out of memory": "vllm/v1/worker/gpu_model_runner.py",
    "unrecognized arguments": "vllm/utils/argparse_utils.py",
    "max_model_len": "vllm/config/model.py",
}
WRITTEN_AS = {"401 client error": "{} client error"}  # with a value in it


def of_python() -> dict[str, str]:
    """The texts that Python and the system make themselves."""
    try:
        (lambda: None)(unheard_of=1)  # type: ignore[call-arg]
    except TypeError as error:
        unexpected = str(error)
    return {
        "connectionerror": builtins.ConnectionError.__name__.lower(),
        "no space left": os.strerror(errno.ENOSPC).lower(),
        "unexpected keyword argument": unexpected,
    }


@functools.cache
def tree_of(file: str) -> ast.Module:
    package, _, rest = file.partition("/")
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / rest
    return ast.parse(path.read_text(), str(path))


def strings_of(file: str) -> Iterator[str]:
    """Every string of a file as it is when it runs, in lower case: pieces joined, `{}` for each value in it."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield "".join(map(str, parts)).lower()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.lower()


def test_every_text_that_a_remedy_is_for_has_its_origin_here() -> None:
    assert FILES.keys() | of_python().keys() == {text for text, _ in REMEDIES}


@pytest.mark.parametrize("text", sorted(FILES))
def test_a_text_that_a_remedy_is_for_is_still_written(text: str) -> None:
    wanted = WRITTEN_AS.get(text, text)
    assert any(wanted in one for one in strings_of(FILES[text])), f"{FILES[text]} does not say {wanted!r} any more"


@pytest.mark.parametrize("text", sorted(of_python()))
def test_a_text_of_python_or_the_system_is_as_expected(text: str) -> None:
    assert text in of_python()[text]


def test_vllms_client_says_that_the_engine_core_failed_as_expected() -> None:
    assert any(NO_CAUSE.lower() in one for one in strings_of("vllm/v1/engine/utils.py"))


def test_a_text_that_is_not_there_is_missed() -> None:
    assert not any("no such text anywhere" in one for one in strings_of("vllm/v1/engine/utils.py"))


def calls_of(file: str, method: str) -> list[int]:
    """The lines of a file that call the method of an object, or let the executor call it in all workers."""
    found = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            remote = node.func.attr == "collective_rpc" and bool(node.args)
            if node.func.attr == method or (remote and ast.unparse(node.args[0]) == repr(method)):
                found.append(node.lineno)
    return sorted(found)


@pytest.mark.parametrize("executor", ["uniproc_executor", "multiproc_executor"])  # Ray's workers are the second one's
def test_a_worker_prepares_its_device_before_it_loads(executor: str) -> None:
    file = f"vllm/v1/executor/{executor}.py"
    (device,) = calls_of(file, "init_device")
    load, *_ = calls_of(file, "load_model")
    assert device < load


def test_rays_workers_start_as_those_of_several_processes_do() -> None:
    (worker,) = (
        node
        for node in ast.walk(tree_of("vllm/v1/executor/ray_executor_v2.py"))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "WorkerProc" for base in node.bases)
    )
    assert worker.name == "RayWorkerProc"


def test_the_engine_core_measures_its_memory_before_it_warms_up() -> None:
    core = "vllm/v1/engine/core.py"
    (memory,) = calls_of(core, "determine_available_memory")
    (warm_up,) = calls_of(core, "compile_or_warm_up_model")
    assert memory < warm_up


def test_a_compilation_ahead_of_time_is_a_call_of_the_hooked_method() -> None:
    assert calls_of("vllm/compilation/decorators.py", "aot_compile")
