"""The rules of the tests themselves: functions from source texts to complaints, as in `house_rules`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

# Names of other projects, which have no public one for it; each is used where its reason stands.
FOREIGN_PRIVATE = frozenset({
    "_apply_app_level_autoscaling_config",  # Ray Serve: how its controller calls our policy
    "_controller",  # Ray Serve: its controller's process, to kill it
    "_deployment_config",  # Ray Serve: what decides whether replicas restart
    "_exit",  # os: ends a process as a crash does
    "_generate_config_file_internal",  # Ray Serve: the configuration that it writes for HAProxy
    "_get_global_client",  # Ray Serve: to find its controller
    "_init_executor",  # vLLM: the method that ours overrides
    "_request_id",  # openai: documented, the id of an answer's request
    "_scheduled",  # asyncio: timers that are left
    "_shutdown",  # vLLM's tests: how their server is ended
})  # fmt: skip
SENDS = frozenset({"send_signal", "kill", "killpg"})
NAMED_TUPLE = frozenset({"_replace", "_asdict", "_fields", "_field_defaults", "_make"})


def private_reads(texts: Mapping[str, str], allowed: frozenset[str] = FOREIGN_PRIVATE) -> list[str]:
    """Private names of other modules that are read, or imported, by path and line."""
    found = []
    for path, text in texts.items():
        tree = ast.parse(text, path)
        own = set(_own_names(tree)) | NAMED_TUPLE | allowed
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            else:
                continue
            found += [f"{path}:{node.lineno}: {name}" for name in names if _is_private(name) and name not in own]
    return found


def unexplained_sleeps(texts: Mapping[str, str]) -> list[str]:
    """Sleeps of more than a turn that say neither what bounds them nor why they are, in a comment there or above."""
    found = []
    for path, text in texts.items():
        lines = ["", *text.splitlines()]
        for node in ast.walk(ast.parse(text, path)):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("asyncio.sleep", "time.sleep")):
                continue
            a_turn = ast.unparse(node.args[0]) in ("0", "0.0")
            if not a_turn and "#" not in lines[node.lineno] and "#" not in lines[node.lineno - 1]:
                found.append(f"{path}:{node.lineno}")
    return found


def uninterruptible(texts: Mapping[str, str]) -> list[str]:
    """Where SIGINT is sent to another process by a module that does not start it with the signal's default action:
    under a caller that ignores SIGINT it would go on."""
    found = []
    for path, text in texts.items():
        tree = ast.parse(text, path)
        if any(isinstance(node, ast.ImportFrom) and node.module == "tests.interruptible" for node in ast.walk(tree)):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SENDS:
                given = [ast.unparse(argument) for argument in node.args]
                if "signal.SIGINT" in given and "os.getpid()" not in given:
                    found.append(f"{path}:{node.lineno}")
    return found


def _own_names(tree: ast.Module) -> Iterator[str]:
    """What the module itself defines: functions, classes, attributes of `self`, annotated fields."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
