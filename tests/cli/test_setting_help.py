"""`serve-app help SETTING`, `--version`, `-h` and completion: what a user asks before anything runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from serve_app.cli import setting_help
from serve_app.cli.commands import app
from serve_app.errors import BadRequest
from serve_app.names import RELEASE
from tests import settings_table
from tests.requires import requires

requires("linux")

Run = Callable[..., Result]
DOCUMENT = Path(__file__).parents[2] / "docs/reference/settings.md"


@pytest.fixture
def run() -> Run:
    return lambda *arguments: CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"}, prog_name="serve-app")


def test_every_setting_has_its_row_and_the_row_is_the_documents(run: Run) -> None:
    known = setting_help.rows()
    assert {row.setting: row.default for row in known} == settings_table.defaults()
    assert [row.setting for row in known if not row.text or "](" in row.text] == []
    shown = run("help", "models[].max_num_seqs").stdout.split("\t")
    assert shown[:3] == ["setting", "models[].max_num_seqs", "64"]
    assert shown[3].strip() in DOCUMENT.read_text()


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("max_num_seqs", ["models[].max_num_seqs"]),
        ("models.0.max_num_seqs", ["models[].max_num_seqs"]),
        ("replicas.min_replicas", ["models[].replicas.min_replicas"]),
        ("admission.tenants.acme.weight", ["admission.tenants.<tenant>.weight"]),
        ("auth.keys.0.limits.requests_per_day", ["<limits>.requests_per_day"]),
        ("admission.tenants.acme.models.chat.tokens_per_day", ["<limits>.tokens_per_day"]),
    ],
)
def test_a_setting_is_found_by_its_name_or_by_the_path_in_an_error(asked: str, found: list[str]) -> None:
    assert [row.setting for row in setting_help.matching(asked, setting_help.rows())] == found


def test_a_section_is_all_of_its_settings(run: Run) -> None:
    reported = json.loads(run("help", "models.0.replicas", "--json").stdout)["data"]
    assert [row["setting"] for row in reported] == [
        name for name in settings_table.defaults() if name.startswith("models[].replicas.")
    ]
    limits = setting_help.matching("limits", setting_help.rows())
    assert {row.setting.partition(".")[0] for row in limits} == {"<limits>"}
    tenants = setting_help.matching("tenants", setting_help.rows())
    assert {row.setting.rpartition(".")[0] for row in tenants} == {"admission.tenants.<tenant>"}
    everything = run("help", "settings").stdout.splitlines()
    assert len(everything) == len(settings_table.defaults())


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        ("max_num_seq", "did you mean max_num_seqs?"),
        ("models.0.num_gpus", "counterpart: models[].gpus_per_rank"),
        ("models.0.pth", "did you mean"),
        ("zzz", "lists all"),
        ("", "lists all"),
    ],
)
def test_what_is_no_setting_is_reported_with_what_is_near(run: Run, asked: str, reported: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(reported)):
        setting_help.matching(asked, setting_help.rows())
    result = run("help", asked)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_help_alone_and_h_are_the_help_of_the_program_and_of_every_command(run: Run) -> None:
    for arguments in (["help"], ["-h"], ["--help"]):
        result = run(*arguments)
        assert result.exit_code == 0
        assert "explain" in result.stdout
    assert run("up", "-h").stdout == run("up", "--help").stdout
    assert "--grace" in run("keys", "rotate", "-h").stdout


def test_the_version_is_the_releases(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"serve-app {RELEASE}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str) -> None:
    def complete(**asked: str) -> str:
        environment = {"_SERVE_APP_COMPLETE": f"complete_{shell}", **asked}
        return CliRunner().invoke(app, [], env=environment, prog_name="serve-app").stdout

    line = {"_TYPER_COMPLETE_ARGS": "serve-app dra", "COMP_WORDS": "serve-app dra", "COMP_CWORD": "1"}
    assert "drain" in complete(**line, _TYPER_COMPLETE_FISH_ACTION="get-args")


def test_the_list_of_commands_begins_with_those_of_a_new_user(run: Run) -> None:
    listed = re.findall(r"^│ ([a-z][a-z-]*) ", run("-h").stdout, re.MULTILINE)
    assert listed[:3] == ["up", "status", "chat"]
    assert {"help", "audit", "drain"} <= set(listed)
    assert len(listed) == len(set(listed)) == len(vars(typer.main.get_command(app))["commands"])
