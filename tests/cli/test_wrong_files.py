"""`serve-app check` says of each wrong file in docs/reference/errors.md and wrong_files.yaml what stands there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from serve_app.cli import check_command as module
from serve_app.cli.check import Cluster, Node
from serve_app.cli.check.findings import WORDS
from serve_app.cli.commands import app
from serve_app.engine import ensure_tiny_model
from serve_app.settings import GB
from tests.first_hour.documents import ERRORS, FILE, MODEL, WrongConfiguration, wrong_configurations
from tests.generated.findings import EXAMPLES
from tests.requires import requires

requires("linux")
requires("vllm")

MACHINE = Cluster((Node(8.0, 0.0, (32 * GB,)),))
FILES = wrong_configurations()
MORE: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("wrong_files.yaml").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wrong")
    shutil.copytree(ensure_tiny_model(made / "models"), made / MODEL)
    return made


@pytest.fixture
def check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """The command with a file of this text."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(module, "this_machine", lambda quota: MACHINE)
    monkeypatch.setattr(module.environment, "platform", lambda: "cpu")
    monkeypatch.setenv("SEQS", "many")
    monkeypatch.delenv("ABSENT", raising=False)

    def run(text: str) -> Result:
        Path(FILE).write_text(text)
        return CliRunner().invoke(
            app, ["check", FILE], env={"SERVE_APP_STATE": str(folder / "state"), "RAY_ADDRESS": None}
        )

    return run


@pytest.mark.parametrize("wrong", FILES, ids=lambda wrong: wrong.code)
def test_a_wrong_file_of_the_documents_is_reported_as_they_say(
    wrong: WrongConfiguration, check: Callable[[str], Result]
) -> None:
    done = check(wrong.text)
    assert done.exit_code == 2
    assert wrong.is_all_of(done.stdout), done.stdout


@pytest.mark.parametrize("wrong", MORE, ids=lambda wrong: wrong["said"].splitlines()[0][:70])
def test_a_wrong_file_is_reported_word_for_word_and_ends_with_the_status_of_its_worst_finding(
    wrong: dict[str, Any], check: Callable[[str], Result]
) -> None:
    done = check(wrong["text"])
    reported, _, summary = done.stdout.partition(f"{FILE}: ")
    if reported.startswith("error: config: "):  # which names the file itself
        reported, _, summary = done.stdout.rpartition(f"{FILE}: ")
    pattern = ".+".join(map(re.escape, wrong["said"].split("{any}")))
    assert re.fullmatch(pattern, reported), done.stdout
    assert summary
    assert done.exit_code == (2 if "error: " in wrong["said"] else 0)


def test_the_output_in_the_documents_is_printed_word_for_word(check: Callable[[str], Result]) -> None:
    (output,) = re.findall(
        rf"^\$ serve-app check {FILE}\n(error: .*?)^```", ERRORS.read_text(), re.MULTILINE | re.DOTALL
    )
    assert check(EXAMPLES["unknown_key"]).stdout == output


def test_thirty_more_files_are_wrong_each_in_another_way() -> None:
    assert len({wrong["said"] for wrong in MORE}) == len({wrong["text"] for wrong in MORE}) == len(MORE) >= 30


def test_there_are_twelve_each_of_another_kind() -> None:
    """No example is lost to a mistake in its form, and of each the whole output is known, too."""
    assert {wrong.code: wrong.text for wrong in FILES} == EXAMPLES
    assert len(FILES) == len(EXAMPLES) == 12
    assert {WORDS[wrong.code].severity for wrong in FILES} == {"error"}
    assert {wrong.text for wrong in FILES} <= {wrong["text"] for wrong in MORE}


def test_other_words_than_the_documents_are_seen() -> None:
    wrong = WrongConfiguration("heads", "", ("error: a.b: it is {value}, not 3", "-> use {another}"))
    reported = "error: a.b: it is 4, not 3\n  -> use 2\n"
    assert wrong.is_reported_in(reported)
    assert wrong.is_reported_in(f"error: z: no room\n{reported}my.yaml: 2 errors\n")
    assert wrong.is_all_of(f"{reported}my.yaml: 1 error\n")
    assert not wrong.is_all_of(f"error: z: no room\n{reported}my.yaml: 2 errors\n")
    assert not wrong.is_reported_in(reported.replace("not 3", "not 5"))
    assert not wrong.is_reported_in("error: a.b: it is 4, not 3\n  -> use\n")
