"""The table of docs/explanation/continuity.md: `python -m tests.e2e.continued_table` cuts the streams of all scenarios
on three vLLM engines, one after the other, and prints of each kind how many continued streams were equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tests.e2e import continuations, continued_streams, thinking, vision
from tests.e2e.assembled import assert_equal

APIS = {
    "chat": "chat, completions",
    "completion": "chat, completions",
    "responses": "Responses",
    "messages": "Messages",
}
KINDS = {  # by a word in the name of a scenario
    "thinking": "thinking",
    "image": "picture",
    "schema": "schema",
    "tool": "tool call",
    "stored": "goes on after a stored response",
    "begun": "goes on in the assistant's turn",
}
PLAIN = "text"


def cell_of(name: str) -> tuple[str, str]:
    """The kind and the API of a scenario."""
    api, *words = name.split("_")
    return next((kind for word, kind in KINDS.items() if word in words), PLAIN), APIS[api]


def is_equal(name: str, cut: dict[str, Any], undisturbed: dict[str, Any]) -> bool:
    try:
        assert_equal(name, cut, undisturbed)
    except AssertionError:
        return False
    return True


def table(equal: Mapping[tuple[str, str], int], cuts: Mapping[tuple[str, str], int]) -> Iterator[str]:
    """Its lines, of the continued streams by kind and API."""
    apis = list(dict.fromkeys(APIS.values()))
    yield f"| kind | {' | '.join(apis)} |"
    yield f"| --- |{' --- |' * len(apis)}"
    for kind in (PLAIN, *KINDS.values()):
        cells = [f"{equal[kind, api]}/{cuts[kind, api]}" if cuts[kind, api] else "" for api in apis]
        yield f"| {kind} | {' | '.join(cells)} |"


def counted(scenarios: Mapping[str, Mapping[str, Any]]) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """The equal streams and all of these scenarios (`continued_streams.cut`, by name), by kind and API."""
    equal = Counter[tuple[str, str]]()
    cuts = Counter[tuple[str, str]]()
    for name, scenario in scenarios.items():
        cuts[cell_of(name)] += len(scenario["cuts"])
        equal[cell_of(name)] += sum(is_equal(name, cut, scenario["undisturbed"]) for cut in scenario["cuts"])
    return equal, cuts


def exact() -> list[str]:
    """The names of all scenarios that can be continued."""
    return [
        *continued_streams.exact(),
        *thinking.CUT,
        *(name for name in vision.CUT if name not in continued_streams.CHAT),
    ]


def main() -> None:
    found = vision.found()["cut"] | continuations.found()["cut"] | thinking.found()["cut"]
    equal, cuts = counted({name: found[name] for name in exact()})
    for line in table(equal, cuts):
        print(line)
    print(f"{equal.total()} of {cuts.total()}")


if __name__ == "__main__":
    main()
