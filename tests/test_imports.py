"""Who imports what: pure cores, one adapter for each young interface, and no registry's address in any file.

Each rule is shown to bite on a small source before it is held against the tree.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import import_rules as rules

ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("serve_app", "autoscaling", "benchmarks", "scripts")
GENERATED = frozenset({".git", ".venv", ".state", ".hypothesis", "build", "__pycache__", "node_modules"})
CORE = "serve_app/core/made_up.py"
SHELL = "serve_app/made_up.py"


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """Text and repository path of every Python module in these folders."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.read_text(), file.relative_to(ROOT).as_posix()


def all_files() -> Iterator[Path]:
    """Every file of the checkout that no tool made."""
    for folder, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name not in GENERATED and not name.endswith(("_cache", ".egg-info"))]
        yield from (Path(folder) / name for name in files)


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import ray",
        "import serve_app.settings",
        "from serve_app.settings import settings",
        "from serve_app.http.deployment import Router",
        "from ..settings import Settings",
        "from .. import quota",
        "import pydantic",
        "def late():\n    import socket",
        "from random import randrange",
        "import random\nrandom.seed(0)",
        "import random\nrng = random.Random()",
        "from datetime import datetime",
        "import importlib\nimportlib.import_module('ray')",
        "def save(x):\n    open('f', 'w').write(x)",
        "import asyncio",
    ],
)
def test_an_impure_core_is_seen(source: str) -> None:
    assert rules.core_complaints(source, CORE)


@pytest.mark.parametrize(
    "source",
    [
        "import heapq\nimport math\nfrom collections.abc import Mapping",
        "import random\ndef pick(rng: random.Random) -> float:\n    return rng.random()",
        "import random\nrng = random.Random(7)",
        "from random import Random",
        "from serve_app.core.queue.queue import Line",
        "from serve_app.errors import Overloaded\nfrom serve_app.types import RequestClass",
        "from . import line\nfrom .line import Line\nfrom ..types import RequestClass",
        "from autoscaling.policies import base",
        "class Clockless:\n    def time(self) -> float:\n        return self.now",
    ],
)
def test_a_pure_core_is_accepted(source: str) -> None:
    assert rules.core_complaints(source, CORE) == []


def test_a_complaint_names_file_and_line() -> None:
    assert rules.core_complaints("import math\n\nimport time", CORE)[0].startswith(f"{CORE}:3: import of time")


@pytest.mark.parametrize("source", ["import vllm", "def f():\n    from vllm.outputs import RequestOutput"])
def test_vllm_outside_its_adapter_is_seen(source: str) -> None:
    assert rules.vllm_complaints(source, SHELL)
    assert rules.vllm_complaints(source, "serve_app/engine/vllm_adapter/engine.py") == []


def test_a_module_named_like_vllm_is_not_vllm() -> None:
    assert rules.vllm_complaints("from serve_app.engine import vllm_adapter\nimport vllm_tools", SHELL) == []


@pytest.mark.parametrize(
    "source",
    [
        "from ray.serve._private.common import ReplicaID",
        "from ray.serve import _private",
        "import ray._raylet",
        "import ray\nray._private.worker.global_worker",
        "def f():\n    import ray._private.services",
    ],
)
def test_private_ray_outside_its_adapters_is_seen(source: str) -> None:
    assert rules.private_ray_complaints(source, SHELL)
    assert rules.private_ray_complaints(source, "serve_app/ray_adapter/handles.py") == []


def test_public_ray_is_accepted() -> None:
    source = "import ray\nfrom ray import serve\nray.get(x)\nray.__version__\nself._ray._private"
    assert rules.private_ray_complaints(source, SHELL) == []


def test_a_registry_host_is_seen() -> None:
    for host in ("py" + "pi.org", "test.py" + "pi.org", "download.py" + "torch.org", "deb.deb" + "ian.org"):
        assert rules.registry_complaints(f"first\nuse https://{host}/simple here", "f") == [f"f:2: {host}"]
    assert rules.registry_complaints("github.com, pytorch, example.org, pypi", "f") == []


def test_cores_are_pure() -> None:
    modules = [*sources(*rules.CORE_FOLDERS), *((ROOT.joinpath(path).read_text(), path) for path in rules.CORE_FILES)]
    assert len(modules) > 2, "the cores have moved: this test walks nothing"
    assert [line for text, path in modules for line in rules.core_complaints(text, path)] == []


def test_only_the_adapter_imports_vllm() -> None:
    found = [line for text, path in sources(*CODE_FOLDERS) for line in rules.vllm_complaints(text, path)]
    assert found == []
    assert (ROOT / rules.VLLM_PACKAGE).is_dir(), "the adapter has moved: this test excepts nothing"


def test_only_the_adapters_touch_private_ray() -> None:
    assert [line for text, path in sources(*CODE_FOLDERS) for line in rules.private_ray_complaints(text, path)] == []


def test_no_file_names_a_package_registry() -> None:
    found: list[str] = []
    seen = 0
    for file in all_files():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue  # a picture or an archive
        seen += 1
        found += rules.registry_complaints(text, file.relative_to(ROOT).as_posix())
    assert seen > 20, "the checkout was not walked"
    assert found == []
