"""The import rules of the project: functions from source text to complaints, so that a test can show that they bite."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.syntax import nodes, parsed

# What a pure core may name besides the standard library.
CORE_FOLDERS = ("serve_app/core", "autoscaling/policies", "autoscaling/simulator")
CORE_FILES = ("autoscaling/policies/signals.py",)
CORE_MAY_IMPORT = (
    "serve_app.core",
    "serve_app.types",
    "serve_app.errors",
    "autoscaling.policies",
    "autoscaling.policies.signals",
    "autoscaling.simulator",
)
# No clock, no randomness of its own, no I/O, nothing that runs beside the caller.
CLOCKS = {"datetime", "time"}
ENTROPY = {"secrets", "uuid"}
CONCURRENCY = {"asyncio", "concurrent", "multiprocessing", "queue", "signal", "subprocess", "threading"}
IO = {
    "ctypes",
    "fcntl",
    "glob",
    "http",
    "io",
    "logging",
    "mmap",
    "os",
    "pathlib",
    "select",
    "selectors",
    "shutil",
    "socket",
    "socketserver",
    "sqlite3",
    "ssl",
    "tempfile",
    "urllib",
}
IMPURE = frozenset(CLOCKS | ENTROPY | CONCURRENCY | IO)
IMPURE_CALLS = frozenset({"open", "input", "print", "__import__", "exec", "eval"})

VLLM_PACKAGE = "serve_app/engine/vllm_adapter/"
PRIVATE_RAY_FILES = frozenset(
    {
        "serve_app/ray_adapter/handles.py",
        "serve_app/ray_adapter/loading.py",
        "serve_app/ray_adapter/nodes.py",
        "serve_app/ray_adapter/request_bodies.py",
        "serve_app/cluster/local/driver.py",
        "autoscaling/operations/application.py",
        "autoscaling/operations/serve_controller.py",
        "autoscaling/operations/node_logs.py",
        "autoscaling/placement_hook.py",
        "autoscaling/unplaced.py",
    }
)

# Spelled in parts, or this file would name what no file may.
REGISTRIES = re.compile(
    r"\b(?:"
    + "|".join(
        (
            r"(?:[\w-]+\.)*py" + r"pi\.org",
            r"files\.python" + r"hosted\.org",
            r"download\.py" + r"torch\.org",
            r"registry\.npm" + r"js\.org",
            r"(?:deb|security|ftp)\.deb" + r"ian\.org",
            r"(?:archive|security|ports)\.ubu" + r"ntu\.com",
            r"(?:repo|conda)\.ana" + r"conda\.(?:com|org)",
            r"pypi\.nvi" + r"dia\.com",
            r"wheels\.vllm\.ai",
            r"(?:index|static)\.cra" + r"tes\.io",
            r"[\w.-]+\.pkg\.dev",
        )
    )
    + r")\b",
    re.IGNORECASE,
)


def imported(tree: ast.AST, path: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything the module imports, wherever in it. `from a import b` gives `a.b`."""
    package = list(PurePosixPath(path).with_suffix("").parts[:-1])
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return ""


def under(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")


def _core_import(name: str) -> str | None:
    """Why a core may not import this name; None if it may."""
    top = name.partition(".")[0]
    if top == "random":
        return None if name in ("random", "random.Random") else "only random.Random, given as an argument"
    if top in IMPURE:
        return "a core has no clock and no I/O"
    if top in sys.stdlib_module_names or any(under(name, allowed) for allowed in CORE_MAY_IMPORT):
        return None
    return "a core imports the standard library and other cores only"


def _core_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Impure things a core does without importing anything forbidden."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if under(name, "random") and name != "random.Random" and not under(name, "random.Random"):
                yield node.lineno, f"{name}: only random.Random, given as an argument"
        elif isinstance(node, ast.Call):
            called = dotted(node.func)
            if called in IMPURE_CALLS or called == "importlib.import_module":
                yield node.lineno, f"{called}(): a core has no I/O and no hidden imports"
            elif called in ("Random", "random.Random") and not node.args:
                yield node.lineno, f"{called}() without a seed draws from the machine"


def core_complaints(source: str, path: str) -> list[str]:
    """What breaks the rule of the pure cores in one module; `path` is relative to the repository."""
    tree = parsed(source)
    reasons = ((line, name, _core_import(name)) for line, name in imported(tree, path))
    found = [(line, f"import of {name}: {reason}") for line, name, reason in reasons if reason is not None]
    return [f"{path}:{line}: {text}" for line, text in sorted([*found, *_core_calls(tree)])]


def vllm_complaints(source: str, path: str) -> list[str]:
    """Imports of vllm outside the package that adapts it."""
    if path.startswith(VLLM_PACKAGE):
        return []
    names = imported(parsed(source), path)
    return [f"{path}:{line}: import of {name}" for line, name in names if under(name, "vllm")]


def _private(name: str) -> bool:
    return under(name, "ray") and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_ray_complaints(source: str, path: str) -> list[str]:
    """Uses of Ray's private modules, imported or reached through `ray`, outside the modules that adapt them."""
    if path in PRIVATE_RAY_FILES:
        return []
    tree = parsed(source)
    found = {(line, name) for line, name in imported(tree, path) if _private(name)}
    chains = ((node.lineno, dotted(node)) for node in nodes(tree) if isinstance(node, ast.Attribute))
    found |= {(line, name) for line, name in chains if _private(name)}
    return [f"{path}:{line}: {name}" for line, name in sorted(found)]


def registry_complaints(text: str, path: str) -> list[str]:
    """Host names of package registries: pip's own configuration names them, no file of ours."""
    lines = enumerate(text.splitlines(), start=1)
    return [f"{path}:{number}: {match.group(0)}" for number, line in lines for match in REGISTRIES.finditer(line)]
