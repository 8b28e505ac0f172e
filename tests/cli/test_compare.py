"""`serve-app compare` with a server of the tests."""

from __future__ import annotations

import json
from typing import Any

from serve_app.types import Outcome
from tests.cli.test_chat import KEY, run, serve  # noqa: F401 - fixtures
from tests.cli.test_records import Run, Serve, answering, page, record
from tests.requires import requires

requires("linux")

ROUTE = {
    "targets": [{"model": "old", "weight": 90}, {"model": "new", "weight": 10}],
    "fallbacks": ["old"],
    "shadow": None,
}
SHADOW = {"shadow": {"model": "next", "share": 0.1}}
NAMED = {"asked_model": "chat"}


def test_the_models_of_a_name_stand_side_by_side_with_their_intervals(run: Run, serve: Serve) -> None:  # noqa: F811
    asked: list[tuple[str, dict[str, list[str]]]] = []
    old = [record(f"o{number}", model="old", **NAMED) for number in range(3)]
    new = [record("n1", Outcome.ENGINE_FAILED, model="new", **NAMED), record("n2", model="new", **NAMED)]
    next_one = [record("x1", model="next", is_shadow=True, **NAMED)]
    pages = [page(*old[:2], cursor="1.0-o1"), page(old[2]), page(*new), page(*next_one)]
    card = {"id": "chat", "route": ROUTE | SHADOW}
    url = serve(answering({"/v1/models/chat": [card], "/admin/requests": pages}, asked))
    done = run("compare", "chat", "--url", url, "--key", KEY, "--json")
    assert done.exit_code == 0, done.output
    first, second, third = json.loads(done.stdout)["models"]
    assert (first["model"], first["part"], first["requests"]) == ("old", "90.0%", 3)
    assert first["first_token_s"] == [0.5, 0.5, 0.5]
    assert (second["model"], second["part"], second["requests"]) == ("new", "10.0%", 2)
    assert second["errors"][0] == 0.5
    assert (third["model"], third["part"], third["requests"]) == ("next", "shadow 10.0%", 1)
    questions = [query for path, query in asked if path == "/admin/requests"]
    assert [(query["model"], query.get("cursor")) for query in questions] == [
        (["old"], None),
        (["old"], ["1.0-o1"]),
        (["new"], None),
        (["next"], None),
    ]


def test_piped_each_model_is_a_line_and_what_is_not_known_a_dash(run: Run, serve: Serve) -> None:  # noqa: F811
    pages = [page(record("o1", model="old", **NAMED)), page()]
    url = serve(answering({"/v1/models/chat": [{"id": "chat", "route": ROUTE}], "/admin/requests": pages}, []))
    done = run("compare", "chat", "--url", url, "--key", KEY)
    assert done.exit_code == 0, done.output
    old, new = (line.split("\t") for line in done.stdout.splitlines())
    assert old[:3] == ["model", "old", "90.0%"]
    assert old[5] == "500 ms (500 to 500)"
    assert new[3:6] == ["0", "-", "-"]


def test_a_model_of_its_own_has_nothing_beside_it(run: Run, serve: Serve) -> None:  # noqa: F811
    cards: dict[str, Any] = {"/v1/models/old": [{"id": "old"}]}
    done = run("compare", "old", "--url", serve(answering(cards, [])), "--key", KEY)
    assert (done.exit_code, "old is a model; give a name of `routes`" in done.stderr) == (2, True)
