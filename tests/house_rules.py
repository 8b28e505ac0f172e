"""The rules of the rooms: functions from source texts to complaints, so that a test can show that each rule bites.

A room is a package or a loose module of `FLOORS`. It may import rooms of lower floors only, and of a package only what
its `__init__` exports. Modules of one room import each other directly, without a circle. A wing is a package inside a
room whose `__init__` has an `__all__`: it has a door, too, for the modules of its room outside it, and for other rooms
if the room exports the wing. Imports for type checkers count like all others.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.house_lines import CodeLength, unrelated_bindings
from tests.import_rules import under
from tests.syntax import nodes, parsed

FLOORS: tuple[tuple[str, ...], ...] = (
    ("serve_app.types", "serve_app.errors", "serve_app.names", "serve_app.core.times"),
    (
        "serve_app.system",
        "serve_app.ray_adapter",
        "serve_app.core.body_bounds",
        "serve_app.core.keyed_heap",
        "serve_app.core.pools",
        "serve_app.core.messages",
        "serve_app.core.token_rates",
        "serve_app.core.turns",
        "serve_app.core.grammar_bounds",
        "serve_app.core.json_bounds",
        "serve_app.core.images",
        "serve_app.core.audio",
        "serve_app.core.media_hosts",
        "serve_app.core.score_inputs",
        "serve_app.core.continuation",
    ),
    (
        "serve_app.core.queue",
        "serve_app.core.placement",
        "serve_app.core.routing",
        "serve_app.core.estimate",
        "serve_app.core.limits",
        "serve_app.core.claims",
        "serve_app.core.schemas",
    ),
    (
        "serve_app.core.anthropic",
        "serve_app.core.names",
        "serve_app.core.memory",
        "serve_app.core.receipts",
        "serve_app.core.usage",
        "serve_app.core.batching",
        "serve_app.core.batches",
        "serve_app.core.responses",
    ),
    (
        "serve_app.core.shared_queue",
        "serve_app.core.kv_budget",
        "serve_app.core.spans",
        "serve_app.core.records",
        "serve_app.core.live",
    ),
    ("serve_app.core.quota",),
    ("serve_app.settings", "serve_app.transport", "serve_app.store"),
    ("serve_app.router", "serve_app.quota", "autoscaling.policies"),
    ("serve_app.batch", "autoscaling", "autoscaling.simulator"),
    ("serve_app.http", "serve_app.engine"),
    ("serve_app.app", "serve_app.cluster.local", "serve_app.cli.check", "serve_app.cli.simulate"),
    ("serve_app.cluster.node",),
    ("serve_app.client", "serve_app.cli"),
    ("serve_app.agents", "serve_app.configured", "serve_app"),
    ("benchmarks",),
)
GROUPS = frozenset({"serve_app.core", "serve_app.cluster"})  # packages of rooms, with nothing of their own
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

MAX_TOP_ENTRIES = 22
MAX_FLOORS = 10  # with core and cluster as one room each
MAX_FILE_LINES = 400  # code lines, as `house_lines` counts them
MAX_FUNCTION_LINES = 50


@dataclass(frozen=True, slots=True)
class Arrow:
    """One imported name. `name` is empty where a module is imported as a whole."""

    line: int
    source: str
    target: str
    name: str


class House:
    """The modules of a tree, by dotted name.

    Args:
        texts: source texts by their path in the repository.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.paths = {_module_of(path): path for path in texts}
        self.trees = {_module_of(path): parsed(text) for path, text in texts.items()}
        self.arrows = [arrow for module in self.trees for arrow in self._arrows(module)]
        self.exports = {module: _exported(tree) for module, tree in self.trees.items()}

    def room_of(self, module: str) -> str:
        """The room that a module is in: the longest name of `FLOORS` it lies under."""
        if module in GROUPS:
            return module
        rooms = [room for room in FLOOR_OF if module == room or (under(module, room) and room != "serve_app")]
        return max(rooms, key=len, default="")

    def wing_of(self, module: str) -> str:
        """The wing that a module is in; empty: it is in none."""
        parts = module.split(".")
        packages = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((package for package in packages if self._is_wing(package)), "")

    def _is_wing(self, module: str) -> bool:
        is_room = module in FLOOR_OF or module in GROUPS
        return not is_room and module in self.paths and self.is_package(module) and bool(self.exports[module])

    def is_package(self, module: str) -> bool:
        return self.paths[module].endswith("/__init__.py")

    def _arrows(self, module: str) -> Iterator[Arrow]:
        package = module.split(".") if self.is_package(module) else module.split(".")[:-1]
        for node in nodes(self.trees[module]):
            if isinstance(node, ast.Import):
                found = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                start = ".".join([*base, *([node.module] if node.module else [])])
                found = [(start, alias.name) for alias in node.names]
            else:
                continue
            for start, name in found:
                if name and f"{start}.{name}" in self.trees:
                    yield Arrow(node.lineno, module, f"{start}.{name}", "")
                elif start in self.trees:
                    yield Arrow(node.lineno, module, start, name)

    def between_rooms(self) -> Iterator[tuple[Arrow, str, str]]:
        """Every import from another room, with both rooms."""
        for arrow in self.arrows:
            ours = self.room_of(arrow.source)
            theirs = self.room_of(arrow.target)
            if ours and theirs and ours != theirs:
                yield arrow, ours, theirs

    def where(self, arrow: Arrow) -> str:
        return f"{self.paths[arrow.source]}:{arrow.line}"


def _module_of(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _exported(tree: ast.Module) -> frozenset[str]:
    """What `__all__` names."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def homeless(house: House) -> list[str]:
    """Modules of the code that are in no room."""
    return [house.paths[module] for module in house.trees if not house.room_of(module)]


def upward(house: House) -> list[str]:
    """Imports from a room of the same floor or of a higher one; groups import nothing."""
    return [
        f"{house.where(arrow)}: {ours} imports {theirs}"
        for arrow, ours, theirs in house.between_rooms()
        if ours in GROUPS or (theirs not in GROUPS and FLOOR_OF[theirs] >= FLOOR_OF[ours])
    ]


def past_the_door(house: House) -> list[str]:
    """Imports from inside another room, or of what its `__init__` does not export; or from one's own `__init__`. The
    same for the wings of a room."""
    found = []
    for arrow, _, theirs in house.between_rooms():
        if theirs in house.paths and house.is_package(theirs):
            wing = house.wing_of(arrow.target)
            is_exported = wing.removeprefix(f"{theirs}.") in house.exports[theirs]
            found += _past(house, arrow, wing if is_exported else theirs)
    for arrow in house.arrows:
        own = house.room_of(arrow.source)
        if own == house.room_of(arrow.target) and (wing := house.wing_of(arrow.target)) != house.wing_of(arrow.source):
            found += _past(house, arrow, wing) if wing else []
        for door in (own, house.wing_of(arrow.source)):
            if arrow.target == door != arrow.source and door in house.paths and house.is_package(door):
                found.append(f"{house.where(arrow)}: a module of {door} imports its own __init__")
    return found


def _past(house: House, arrow: Arrow, door: str) -> list[str]:
    """What is wrong with an import through this door."""
    if arrow.target == door:
        if not arrow.name or arrow.name in house.exports[door]:
            return []
        return [f"{house.where(arrow)}: {door} does not export {arrow.name}"]
    if not arrow.name and arrow.target.removeprefix(f"{door}.") in house.exports[door]:
        return []
    return [f"{house.where(arrow)}: {arrow.target} is inside {door}"]


def unused_exports(house: House, outside: Iterable[str]) -> list[str]:
    """What a room exports and no other room, and none of the names `outside`, uses; and a wing, and nobody else."""
    wings = {wing for module in house.trees if (wing := house.wing_of(module))}
    used = set[tuple[str, str]]()
    for arrow in house.arrows:
        names = [*arrow.target.split("."), *([arrow.name] if arrow.name else [])]
        doors = (".".join(names[:length]) for length in range(1, len(names)))  # of `a.b.c`: `c` of `a.b`, `b` of `a`
        used |= {(door, name) for door, name in zip(doors, names[1:], strict=True) if not under(arrow.source, door)}
    attributes = {node.attr for tree in house.trees.values() for node in nodes(tree) if isinstance(node, ast.Attribute)}
    return [
        f"{room}: {name}"
        for room in (*FLOOR_OF, *sorted(wings))
        for name in sorted(house.exports.get(room, ()))
        if (room, name) not in used and name not in attributes and f"{room}.{name}" not in set(outside)
    ]


def circles(house: House) -> list[tuple[str, ...]]:
    """Groups of modules that import each other, each sorted. The `__init__` of a room is no part of one."""
    graph: dict[str, set[str]] = defaultdict(set)
    for arrow in house.arrows:
        if arrow.source != arrow.target and not {arrow.source, arrow.target} & set(FLOOR_OF) & _packages(house):
            graph[arrow.source].add(arrow.target)
    return sorted(tuple(sorted(group)) for group in _components(graph) if len(group) > 1)


def _packages(house: House) -> set[str]:
    return {module for module in house.paths if house.is_package(module)}


def _components(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Strongly connected components (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for after in graph.get(node, ()):
            if after not in index:
                visit(after)
                low[node] = min(low[node], low[after])
            elif after in stack:
                low[node] = min(low[node], index[after])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(set(stack[at:]))
            del stack[at:]

    for node in list(graph):
        if node not in index:
            visit(node)
    return found


def doubled_classes(house: House) -> dict[str, list[str]]:
    """Class names that occur in more than one module of what ships."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, tree in house.trees.items():
        if not under(module, "benchmarks"):
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(module)
    return {name: modules for name, modules in sorted(found.items()) if len(modules) > 1}


def long_files(lengths: Mapping[str, CodeLength]) -> dict[str, int]:
    """Files above the limit, with their code lines."""
    return {path: length.lines for path, length in lengths.items() if length.lines > MAX_FILE_LINES}


def long_functions(lengths: Mapping[str, CodeLength]) -> dict[str, int]:
    """Functions above the limit as `path:name`, with their code lines."""
    return {
        f"{path}:{name}": lines
        for path, length in lengths.items()
        for name, lines in length.functions
        if lines > MAX_FUNCTION_LINES
    }


def files_with_unrelated_bindings(texts: Mapping[str, str]) -> dict[str, int]:
    """How many unrelated bindings the files have that have any."""
    counts = {path: len(unrelated_bindings(text)) for path, text in texts.items()}
    return {path: count for path, count in counts.items() if count}


def floors(house: House) -> int:
    """How many rooms stand on each other at most, with `core` and `cluster` as one room each."""
    below: dict[str, set[str]] = defaultdict(set)
    for _, ours, theirs in house.between_rooms():
        if _house_room(ours) != _house_room(theirs):
            below[_house_room(ours)].add(_house_room(theirs))
    heights: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in heights:
            heights[room] = 1 + max((height(one) for one in below[room]), default=0)
        return heights[room]

    return max(height(room) for room in list(below))


def _house_room(room: str) -> str:
    parts = room.split(".")
    return ".".join(parts[:2] if parts[0] == "serve_app" else parts[:1])
