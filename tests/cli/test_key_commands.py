"""`serve-app keys` against the routes that it calls, on a store of its own."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import Result

from serve_app.cli import key_commands
from serve_app.core.limits import Limits
from serve_app.errors import BadRequest, ServeAppError
from serve_app.http.api import routes
from serve_app.http.api.key_routes import KeyRoutes
from serve_app.http.error_responses import error_response
from serve_app.http.keys import KeyRing
from serve_app.settings import Settings, parse
from tests.cli.test_chat import KEY, run, serve  # noqa: F401 - fixtures
from tests.fakes.stores import FakeStore, follower_of, no_keys, record
from tests.requires import requires

requires("linux")

Keys = Callable[..., Result]
SETTINGS: Settings = parse(
    {
        "auth": {"keys": [{"key": KEY, "name": "ops", "admin": True}]},
        "admission": {
            "tenants": {"acme": {"limits": {"max_concurrent": 9}, "models": {"tiny": {"tokens_per_day": 5000}}}}
        },
    }
)
MINE = "sk-mine-0123456789"
DOCUMENT = Path(__file__).parents[2] / "docs/how-to/manage-keys.md"


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return FakeStore(tmp_path)


@pytest.fixture
def keys(run: Callable[..., Result], serve: Callable[..., str], store: FakeStore) -> Keys:  # noqa: F811
    """Runs `serve-app keys ...` at an endpoint with this store."""
    ring = KeyRing(SETTINGS.auth, no_keys())
    answers = KeyRoutes(follower_of(store), lambda: ring, lambda: SETTINGS)

    def answer(request: BaseHTTPRequestHandler, body: dict[str, Any] | None) -> None:
        async def read() -> tuple[dict[str, Any], int]:
            return body or {}, 0

        try:
            identity = ring.identify({b"authorization": (request.headers["Authorization"] or "").encode()})
            route = routes.resolve(request.command, request.path)
            status, headers, text = asyncio.run(answers.answer(route, identity, read))
        except ServeAppError as error:
            status, headers, text = error_response(error)
        request.send_response(status)
        for name, value in headers:
            request.send_header(name.decode(), value.decode())
        request.end_headers()
        request.wfile.write(text)

    url = serve(answer)
    return lambda *arguments: run("keys", arguments[0], "--url", url, "--key", KEY, *arguments[1:])


def test_a_key_is_made_listed_rotated_and_revoked(keys: Keys, store: FakeStore) -> None:
    made = keys("create", "laptop", "--tenant", "acme", "--model", "tiny", "--model", "other", "--expires", "90d")
    assert made.exit_code == 0, made.output
    kind, key_id, name, tenant, state, top, models, rights, expires, key = made.stdout.rstrip("\n").split("\t")
    assert (kind, name, tenant, state, top) == ("key", "laptop", "acme", "active", "high")
    assert (models, rights) == ("tiny other", "-")
    assert key.startswith("sk-")
    listed = keys("list")
    row = ["key", key_id, "laptop", "acme", "active", "high", "tiny other", "-", expires]
    assert [line.split("\t") for line in listed.stdout.splitlines()][1:] == [row]
    rotated = json.loads(keys("rotate", key_id, "--grace", "1h", "--json").stdout)
    assert rotated["id"] == key_id
    assert rotated["key"] not in (key, None)
    revoked = keys("revoke", key_id)
    assert revoked.stdout.split("\t")[4] == "revoked"
    assert [one.exit_code for one in (listed, revoked)] == [0, 0]
    for secret in (key, rotated["key"]):
        assert secret not in listed.stdout + revoked.stdout + keys("list", "--json").stdout


def test_the_commands_of_the_document_work_in_its_order(keys: Keys, store: FakeStore) -> None:
    lines = re.findall(r"^\$ serve-app keys (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["create", "list", "show-limits", "update", "rotate", "revoke"]
    for line in lines:
        made = asyncio.run(store.keys())
        arguments = shlex.split(re.sub(r"key_[0-9a-f]{16}", made[0].key_id if made else "", line))
        result = keys(*arguments)
        assert result.exit_code == 0, (line, result.output)
    (record_,) = asyncio.run(store.keys())
    assert (record_.tenant, record_.models, record_.expires_at) == ("research", ("chat", "code"), None)
    assert record_.revoked_at is not None
    assert record_.limits == Limits(requests_per_minute=60, tokens_per_minute=150_000, tokens_per_day=1_000_000)


def test_json_is_what_the_route_answers(keys: Keys, store: FakeStore) -> None:
    limits = ("--requests-per-minute", "60", "--max-concurrent", "4", "--budget-per-month", "12.5")
    made = json.loads(keys("create", "\U0001f511 caf\u00e9", "--admin", "--metrics", *limits, "--json").stdout)
    assert made["limits"] == {"requests_per_minute": 60.0, "max_concurrent": 4, "budget_per_month": 12.5}
    assert made["name"] == "\U0001f511 caf\u00e9"
    assert (made["admin"], made["metrics"], made["expires_at"]) == (True, True, None)
    listed = json.loads(keys("list", "--json").stdout)
    assert [one["id"] for one in listed["data"]] == ["ops", made["id"]]


def test_a_key_of_a_low_class_needs_no_default_class(keys: Keys, store: FakeStore) -> None:
    for given, default in (("low", "low"), ("normal", "normal"), ("critical", "normal")):
        made = json.loads(keys("create", "night", "--max-class", given, "--json").stdout)
        assert (made["max_class"], made["default_class"]) == (given, default)
    above = keys("create", "night", "--max-class", "low", "--default-class", "normal")
    assert (above.exit_code, "above" in above.stderr) == (2, True)


def test_the_limits_of_a_key_s_batches_are_given_by_name_and_shown(keys: Keys, store: FakeStore) -> None:
    limits = ("--batch-limit", "max_concurrent=8", "--batch-limit", "tokens_per_day=1000000")
    made = json.loads(keys("create", "night", *limits, "--json").stdout)
    assert made["batch_limits"] == {"max_concurrent": 8, "tokens_per_day": 1_000_000}
    shown = keys("show-limits", made["id"]).stdout.splitlines()
    assert "limit\tbatches of this key\tmax_concurrent\t8" in shown
    for wrong in ("max_concurrent", "max_concurrent=many", "no_such=1"):
        assert keys("create", "night", "--batch-limit", wrong).exit_code != 0


def test_an_update_changes_what_it_names_and_nothing_else(keys: Keys, store: FakeStore) -> None:
    limits = ("--requests-per-minute", "60", "--tokens-per-day", "5000", "--batch-limit", "max_concurrent=8")
    made = json.loads(keys("create", "laptop", "--model", "tiny", "--expires", "90d", *limits, "--json").stdout)
    changes = ("--limit", "tokens_per_day=none", "--limit", "max_concurrent=3", "--batch-limit", "max_concurrent=none")
    result = keys("update", made["id"], "--all-models", "--admin", "--expires", "never", *changes, "--json")
    changed = json.loads(result.stdout)
    wanted = {
        "models": None,
        "admin": True,
        "expires_at": None,
        "limits": {"requests_per_minute": 60.0, "max_concurrent": 3},
        "batch_limits": {},
    }
    assert changed == {name: value for name, value in made.items() if name != "key"} | wanted
    narrowed = json.loads(keys("update", made["id"], "--model", "a", "--no-admin", "--name", "b", "--json").stdout)
    assert (narrowed["models"], narrowed["admin"], narrowed["name"]) == (["a"], False, "b")
    assert keys("update", made["id"], "--name", "c").stdout.split("\t")[:3] == ["key", made["id"], "c"]


def test_limits_are_shown_by_what_has_them(keys: Keys, store: FakeStore) -> None:
    made = asyncio.run(store.create_key(record(MINE)))
    lines = keys("show-limits", made.key_id).stdout.splitlines()
    assert [line.split("\t") for line in lines] == [
        ["limit", "tenant acme", "max_concurrent", "9"],
        ["limit", "tiny of tenant acme", "tokens_per_day", "5000"],
        ["over_limit", "refuse"],
    ]
    nothing = keys("show-limits", "ops")
    assert (nothing.exit_code, nothing.stdout) == (0, "")


def test_limits_are_shown_exactly_and_as_scripts_read_them(keys: Keys, store: FakeStore) -> None:
    given = {"tokens_per_minute": "12345678.5", "tokens_per_day": "20000001", "budget_per_month": "0.25"}
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    key_id = json.loads(keys("create", "large", *options, "--json").stdout)["id"]
    shown = [line.split("\t") for line in keys("show-limits", key_id).stdout.splitlines()]
    assert {one[2]: one[3] for one in shown if one[0] == "limit" and one[1] == "key"} == given


def test_an_error_is_one_line_and_a_status(keys: Keys, store: FakeStore) -> None:
    wrong = {
        ("revoke", "key_0000000000000000"): "there is no key",
        ("revoke", "../keys"): "there is no key",
        ("revoke", "ops"): "key of the configuration",
        ("create", ""): "name",
        ("create", "x", "--max-class", "urgent"): "low, normal, high, critical",
        ("create", "x", "--burst-requests", "5"): "requests_per_minute",
        ("create", "x", "--expires", "soon"): "--expires soon",
        ("create", "x", "--expires", "2001-01-01"): "has passed",
        ("rotate", "ops", "--grace", "long"): "--grace long",
        ("update", "ops", "--name", "x"): "key of the configuration",
        ("update", "key_0000000000000000"): "nothing is to be changed",
        ("update", "key_0000000000000000", "--name", "x"): "there is no key",
        ("update", "ops", "--model", "x", "--all-models"): "give one of them",
        ("update", "ops", "--limit", "tokens_per_day"): "--limit tokens_per_day",
    }
    for arguments, text in wrong.items():
        result = keys(*arguments)
        assert result.exit_code == 2, arguments
        assert text in result.stderr
        assert len(result.stderr.splitlines()) == 1
    store.away = True
    result = keys("list")
    assert result.exit_code == 1
    assert "503" in result.stderr


def test_another_key_than_an_operators_is_refused(run: Callable[..., Result], keys: Keys) -> None:  # noqa: F811
    result = keys("list", "--key", "sk-somebody-0123456789")
    assert result.exit_code != 0
    assert "Incorrect API key" in result.stderr
    assert run("keys", "list").exit_code == 3  # no instance runs


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("90d", "2026-03-31T12:00:00+00:00"),
        ("12h", "2026-01-01T00:00:00+00:00"),
        ("2027-01-31", "2027-01-31T00:00:00+00:00"),
        ("2027-01-31T10:00:00+01:00", "2027-01-31T10:00:00+01:00"),
        ("2027-01-31T10:00:00Z", "2027-01-31T10:00:00+00:00"),
    ],
)
def test_an_end_is_a_date_a_time_or_a_duration(text: str, time: str) -> None:
    assert key_commands.expiry(text, datetime(2025, 12, 31, 12, tzinfo=UTC)) == time


@pytest.mark.parametrize("text", ["", "-1d", "1w", "1e3", "inf", "99999999d", "2027-13-01"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="--expires"):
        key_commands.expiry(text, datetime.now(UTC))


def test_on_a_terminal_the_key_stands_alone_and_is_reported_to_be_shown_once() -> None:
    console = Console(force_terminal=True, width=60, record=True, color_system=None)
    shown = dict.fromkeys(("models", "expires_at")) | {"admin": False, "metrics": False, "max_class": "high"}
    found = shown | {
        "id": "key_1",
        "name": "laptop",
        "tenant": "acme",
        "state": "active",
        "previous_until": "2027-01-01",
    }
    key_commands.show_change(found | {"key": "sk-" + "x" * 43}, console)
    lines = console.export_text().splitlines()
    assert lines[0].strip() == "sk-" + "x" * 43
    assert "this once" in lines[1]
    assert "2027-01-01" in lines[-1]
