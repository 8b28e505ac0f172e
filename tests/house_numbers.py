"""Prints the size of each room: `python -m tests.house_numbers [TREE]`. `TREE` is a checkout, this one by default.

Code lines and unrelated bindings are those of `house_lines`. To compare with an earlier commit, give a second worktree:
`git worktree add /tmp/before COMMIT && python -m tests.house_numbers /tmp/before`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.house_lines import code_length, unrelated_bindings
from tests.house_rules import FLOOR_OF, House

ROOT = Path(__file__).resolve().parent.parent
COUNTED = ("serve_app", "autoscaling")


@dataclass(slots=True)
class RoomSize:
    """Counts of one room."""

    files: int = 0
    code_lines: int = 0
    unrelated_bindings: int = 0

    def add(self, text: str) -> None:
        self.files += 1
        self.code_lines += code_length(text).lines
        self.unrelated_bindings += len(unrelated_bindings(text))


def room_sizes(texts: Mapping[str, str]) -> dict[str, RoomSize]:
    """The rooms that have files, from the highest floor down, and `all` of them."""
    house = House(texts)
    rooms = {house.paths[module]: house.room_of(module) for module in house.trees}
    order = sorted(set(rooms.values()), key=lambda room: (-FLOOR_OF.get(room, -1), room))
    sizes = {name: RoomSize() for name in [*order, "all"]}
    for path, text in texts.items():
        sizes[rooms[path]].add(text)
        sizes["all"].add(text)
    return sizes


def main(tree: Path) -> None:
    paths = [path for folder in COUNTED for path in sorted((tree / folder).rglob("*.py"))]
    sizes = room_sizes({path.relative_to(tree).as_posix(): path.read_text() for path in paths})
    print(f"{'room':<36}{'files':>8}{'code lines':>12}{'unrelated bindings':>20}")
    for room, size in sizes.items():
        files, lines, bindings = astuple(size)
        print(f"{room or 'in no room':<36}{files:>8}{lines:>12}{bindings:>20}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
