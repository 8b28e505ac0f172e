"""The rules of the tests themselves: functions from source texts to complaints, as in `house_rules`."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from tests.house_rules import FLOOR_OF, House
from tests.syntax import nodes, parsed

# Names of other projects, which have no public one for it; each is used where its reason stands.
FOREIGN_PRIVATE = frozenset({
    "_app_autoscaling_states",  # Ray Serve: where its controller keeps what our policy has decided
    "_apply_app_level_autoscaling_config",  # Ray Serve: how its controller calls our policy
    "_controller",  # Ray Serve: its controller's process, to kill it
    "_decode_and_chunk_speech_async",  # vLLM: what ours wraps
    "_deployment_config",  # Ray Serve: what decides whether replicas restart
    "_exit",  # os: ends a process as a crash does
    "_generate_config_file_internal",  # Ray Serve: the configuration that it writes for HAProxy
    "_get_global_client",  # Ray Serve: to find its controller
    "_get_verbose_segments",  # vLLM: what ours wraps
    "_init_executor",  # vLLM: the method that ours overrides
    "_preprocess_speech_to_text",  # vLLM: what ours wraps
    "_request_id",  # openai: documented, the id of an answer's request
    "_scheduled",  # asyncio: timers that are left
    "_shutdown",  # vLLM's tests: how their server is ended
})  # fmt: skip
WAITING = "waiting.py"
POLLS = frozenset({"time.sleep"})
CLOCKS = frozenset({"quiet_time", "time.monotonic", "time.perf_counter", "time.time"})
SENDS = frozenset({"send_signal", "kill", "killpg"})
DEEP = 3  # names: `queue.core.in_flight`
COLLECTIONS = frozenset(name for kind in (dict, list, set, str) for name in dir(kind))
NAMED_TUPLE = frozenset({"_replace", "_asdict", "_fields", "_field_defaults", "_make"})


def private_reads(texts: Mapping[str, str], allowed: frozenset[str] = FOREIGN_PRIVATE) -> list[str]:
    """Private names of other modules that are read, or imported, by path and line."""
    found = []
    for path, text in texts.items():
        tree = parsed(text)
        own = set(_own_names(tree)) | NAMED_TUPLE | allowed
        for node in nodes(tree):
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            else:
                continue
            found += [f"{path}:{node.lineno}: {name}" for name in names if _is_private(name) and name not in own]
    return found


def room_names(house: House) -> dict[str, set[str]]:
    """What the classes of our rooms define, by name: the rooms that have it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for module, tree in house.trees.items():
        for name in _names_in_classes(tree):
            found[name].add(house.room_of(module))
    return found


def deep_reaches(texts: Mapping[str, str], rooms: Mapping[str, set[str]]) -> dict[str, int]:
    """How often the files reach through an object of a room to what another room has behind it, by path.

    Such a reach is a chain of `DEEP` names or more that classes of our rooms define. A name before them that a class of
    the tests has is the tests' own object; what the tests' own room defines, it may read.
    """
    trees = {path: parsed(text) for path, text in texts.items()}
    own = {name for tree in trees.values() for name in _names_in_classes(tree)}
    found: Counter[str] = Counter()
    for path, tree in trees.items():
        room = _room_of_tests(path)
        for names in _chains(tree):
            chain = names[1:] if names[0] in own else names
            while chain and (chain[-1] not in rooms or chain[-1] in COLLECTIONS):
                chain = chain[:-1]
            reach = chain[-DEEP:]
            if len(reach) == DEEP and all(name in rooms for name in reach) and room not in rooms[reach[-1]]:
                found[path] += 1
    return dict(found)


def _chains(tree: ast.Module) -> Iterator[list[str]]:
    """The names of each attribute of an attribute, but of imported modules and of the official SDK; of `self.a.b` those
    behind `a`, which is its own."""
    imported = {alias.asname or alias.name for node in nodes(tree) for alias in _imported(node)}
    inner = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Attribute)}
    for node in nodes(tree):
        names: list[str] = []
        start: ast.expr | None = node if isinstance(node, ast.Attribute) and id(node) not in inner else None
        while isinstance(start, ast.Attribute):
            names.insert(0, start.attr)
            start = start.value
        base = start.id if isinstance(start, ast.Name) else ""
        if names and base not in imported and "openai" not in names:
            yield names[1:] or names if base == "self" else names


def _imported(node: ast.AST) -> Iterable[ast.alias]:
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else ()


def _names_in_classes(tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _own_names(node)


def _room_of_tests(path: str) -> str:
    """The room that a file in `tests` is for, or an empty name."""
    parts = path.split("/")[:-1]
    named = (".".join(("serve_app", *parts[:count])) for count in range(len(parts), 0, -1))
    return next((name for name in named if name in FLOOR_OF), "")


def unexplained_sleeps(texts: Mapping[str, str]) -> list[str]:
    """Sleeps of more than a turn that say neither what bounds them nor why they are, in a comment there or above."""
    found = []
    for path, text in texts.items():
        lines = ["", *text.splitlines()]
        for node in nodes(parsed(text)):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("asyncio.sleep", "time.sleep")):
                continue
            a_turn = ast.unparse(node.args[0]) in ("0", "0.0")
            if not a_turn and "#" not in lines[node.lineno] and "#" not in lines[node.lineno - 1]:
                found.append(f"{path}:{node.lineno}")
    return found


def own_waits(texts: Mapping[str, str]) -> list[str]:
    """Loops that wait by a bound of their own, by path and line: a `while` that sleeps or compares what a clock says,
    and a `for` that does both. `WAITING` has the one that waits, and bounds it in seconds of a quiet machine."""
    found = []
    for path, text in texts.items():
        for node in nodes(parsed(text)) if path != WAITING else ():
            if isinstance(node, ast.While | ast.For | ast.AsyncFor):
                polls = any(isinstance(part, ast.Call) and ast.unparse(part.func) in POLLS for part in ast.walk(node))
                compares = any(isinstance(part, ast.Compare) and _reads_clock(part) for part in ast.walk(node))
                is_wait = polls or compares if isinstance(node, ast.While) else polls and compares
                found += [f"{path}:{node.lineno}"] if is_wait else []
    return found


def _reads_clock(compared: ast.Compare) -> bool:
    """Whether a side is what a clock says, or a sum with that."""
    sides = [compared.left, *compared.comparators]
    while sides:
        side = sides.pop()
        if isinstance(side, ast.BinOp):
            sides += [side.left, side.right]
        elif isinstance(side, ast.Call) and ast.unparse(side.func) in CLOCKS:
            return True
    return False


def uninterruptible(texts: Mapping[str, str]) -> list[str]:
    """Where SIGINT is sent to another process by a module that does not start it with the signal's default action:
    under a caller that ignores SIGINT it would go on."""
    found = []
    for path, text in texts.items():
        tree = parsed(text)
        if any(isinstance(node, ast.ImportFrom) and node.module == "tests.interruptible" for node in nodes(tree)):
            continue
        for node in nodes(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SENDS:
                given = [ast.unparse(argument) for argument in node.args]
                if "signal.SIGINT" in given and "os.getpid()" not in given:
                    found.append(f"{path}:{node.lineno}")
    return found


def _own_names(tree: ast.AST) -> Iterator[str]:
    """What the module itself defines: functions, classes, attributes of `self`, annotated fields."""
    for node in nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
