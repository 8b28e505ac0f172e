"""`serve-app check`, `serve-app deploy --plan` and the check of `serve-app up`: output and exit status."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli import check_command as module
from serve_app.cli import commands
from serve_app.cli.commands import app
from serve_app.cluster.local import InstanceState
from serve_app.names import RELEASE
from serve_app.settings import GB, parse
from tests.e2e.stack import CONFIG, LOGICAL_CPUS
from tests.requires import requires

requires("linux")

DEPLOYED = {"models": [{"name": "a"}, {"name": "b"}], "auth": {"keys": [{"key_sha256": "ab" * 32}]}}
NODE = {"resources": {"CPU": 4.0}, "device_bytes": [12 * GB]}
ANSWER = {
    "nodes": [NODE],
    "arguments": {"release": RELEASE, **parse(DEPLOYED).model_dump(mode="json")},
    "replicas": {"engine-a": ["a1"], "engine-b": ["b1", "b2"], "Router": ["r1"]},
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    def invoke(*arguments: str) -> Result:
        environment = {"SERVE_APP_STATE": str(tmp_path / "state"), "COLUMNS": "80", "RAY_ADDRESS": None}
        return CliRunner().invoke(app, list(arguments), env=environment)

    return invoke


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "my.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A cluster that answers; what it was asked."""
    asked: list[dict[str, Any]] = []

    def answer(order: dict[str, Any]) -> dict[str, Any]:
        asked.append(order)
        return ANSWER

    monkeypatch.setattr(module, "ask", answer)
    return asked


def test_a_sound_file_is_reported(run: Callable[..., Result], file: Callable[[str], str], tmp_path: Path) -> None:
    config = file("models: [{name: a}]")
    done = run("check", config)
    assert done.exit_code == 0
    summary, memory = done.stdout.splitlines()
    assert summary == f"{config}: nothing is wrong with it"
    assert memory.startswith("  a: a rank needs ")
    assert [one.name for one in tmp_path.iterdir()] == ["my.yaml"]


def test_all_mistakes_are_reported_each_on_a_line_of_its_own(
    run: Callable[..., Result], file: Callable[[str], str]
) -> None:
    config = file("{modles: 1, http: {max_sequences: 0}}")
    done = run("check", config)
    assert done.exit_code == 2
    assert done.stdout.splitlines() == [
        "error: http.max_sequences: line 1: 0 is too small: it must be 1 or more",
        "  -> what each setting takes: serve-app help SETTING",
        "error: modles: unknown key",
        "  -> did you mean models?",
        f"{config}: 2 errors",
    ]


@pytest.mark.parametrize("command", ["check", "up", "deploy"])
def test_a_mistake_elsewhere_hides_none_of_a_model_s(
    run: Callable[..., Result], file: Callable[[str], str], orders: list[dict[str, Any]], command: str
) -> None:
    config = file(
        "http: {zzz: 1}\nmodels:\n- {name: wrong, kv_cache_gb: much}\n"
        "- {name: a, path: /nowhere/a}\n- {name: b, extra_engine_args: {zzz: 1}}\n"
    )
    done = run(command, *(["--config"] if command != "check" else []), config)
    assert done.exit_code != 0
    reported = [line.split(": ")[1] for line in done.output.splitlines() if line.startswith("error: ")]
    assert reported == ["http.zzz", "models.0.kv_cache_gb", "models.1.path", "models.2.extra_engine_args.zzz"]
    assert not orders


def test_as_json_it_is_one_object(run: Callable[..., Result], file: Callable[[str], str]) -> None:
    done = run("check", file("models: [{name: a, kv_cache_gb: 100000}]"), "--json")
    assert done.exit_code == 2
    (found,) = json.loads(done.stdout)["findings"]
    assert (found["code"], found["path"], found["severity"]) == (
        "memory_too_large",
        "models.0.kv_cache_gb",
        "error",
    )


def test_a_warning_alone_is_no_failure(run: Callable[..., Result], file: Callable[[str], str]) -> None:
    done = run("check", file("admission: {trickle_share: 0.1}"))
    assert done.exit_code == 0
    assert done.stdout.startswith("warning: config: admission.trickle_share is called admission.min_share now")
    *_, summary, memory = done.stdout.splitlines()
    assert summary.endswith("1 warning")
    assert re.fullmatch(r"  tiny: a rank needs \d+\.\d\d GB \(estimated\) beside its KV cache", memory)


def test_a_cluster_is_asked_for_what_it_has_and_may_grow(
    run: Callable[..., Result], file: Callable[[str], str], orders: list[dict[str, Any]]
) -> None:
    done = run("check", file("models: [{name: a, kv_cache_gb: 500, path: /of/a/node}]"), "--address", "head:6379")
    assert done.exit_code == 0
    assert "the largest device has 12.00 GB (a node that is added may have it)" in done.stdout
    assert "warning: models.0.path: there is no folder /of/a/node" in done.stdout
    (order,) = orders
    assert (order["do"], order["environment"]["RAY_ADDRESS"]) == ("deployed", "head:6379")


def test_the_plan_tells_which_replicas_restart_and_why(
    run: Callable[..., Result], file: Callable[[str], str], orders: list[dict[str, Any]]
) -> None:
    config = file("models: [{name: a, max_num_seqs: 64}, {name: b, max_num_seqs: 8}, {name: c}]")
    done = run("deploy", "--config", config, "--plan", "--address", "head:6379")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        f"{config}: nothing is wrong with it",
        "= engine-a (1 replica): unchanged: the same settings",
        "! engine-b (2 replicas): restarted: an engine cannot take this over while it runs",
        "    max_num_seqs: 64 -> 8",
        "+ engine-c: added: new in the configuration",
        "~ Router (1 replica): changed: taken over without a restart",
        "~ BatchWorker: changed: taken over without a restart",
    ]
    document = json.loads(run("deploy", "--config", config, "--plan", "--json", "--address", "head:6379").stdout)
    assert {one["deployment"]: one["replicas"] for one in document["plan"] if one["what"] == "restarted"} == {
        "engine-b": ["b1", "b2"]
    }


def test_a_plan_of_a_wrong_file_asks_nobody_and_one_needs_a_cluster(
    run: Callable[..., Result], file: Callable[[str], str], orders: list[dict[str, Any]]
) -> None:
    done = run("deploy", "--config", file("modles: 1"), "--plan", "--address", "head:6379")
    assert (done.exit_code, orders) == (2, [])
    assert "did you mean models?" in done.stdout
    done = run("deploy", "--config", file("models: [{name: a}]"), "--plan")
    assert done.exit_code == 1
    assert "nothing runs" in done.stderr


@pytest.mark.parametrize(
    "text", ["modles: 1", "", "models: [{name: a, kv_cache_gb: 100000, kv_cache_min_gb: 200000}]", "models: [{name: a"]
)
def test_one_finding_has_one_exit_status_whichever_command_finds_it(
    run: Callable[..., Result], file: Callable[[str], str], orders: list[dict[str, Any]], text: str
) -> None:
    config = file(text)
    where = ("--address", "head:6379")
    commands_ = {
        "check": ("check", config, *where),
        "plan": ("deploy", "--config", config, "--plan", *where),
        "deploy": ("deploy", "--config", config, *where),
        "unchecked": ("deploy", "--config", config, "--no-check", *where),
        "up": ("up", "--config", config),
        "export": ("export", "--config", config),
    }
    assert {name: run(*arguments).exit_code for name, arguments in commands_.items()} == dict.fromkeys(commands_, 2)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    begun: list[Any] = []
    monkeypatch.setattr(commands.running, "up", lambda options, console: begun.append(options))
    return begun


def test_up_checks_first_and_starts_nothing_that_cannot_run(
    run: Callable[..., Result], file: Callable[[str], str], started: list[Any]
) -> None:
    config = file("models: [{name: a, kv_cache_gb: 100000}, {name: b, path: /nowhere}]")
    done = run("up", "--config", config)
    assert (done.exit_code, started) == (2, [])
    assert "memory_too_large" not in done.stderr
    assert "error: models.0.kv_cache_gb" in done.stderr
    assert "error: models.1.path: there is no folder /nowhere" in done.stderr
    assert run("up", "--config", config, "--no-check").exit_code == 0
    assert len(started) == 1


def test_up_tells_all_mistakes_of_a_file(
    run: Callable[..., Result], file: Callable[[str], str], started: list[Any]
) -> None:
    done = run("up", "--config", file("{modles: 1, http: {max_sequences: 0}}"))
    assert (done.exit_code, started) == (2, [])
    assert done.stderr.count("error: ") == 2


def test_up_starts_what_is_served_by_default(run: Callable[..., Result], started: list[Any]) -> None:
    done = run("up")
    assert (done.exit_code, len(started)) == (0, 1), done.stderr


def test_on_a_terminal_lines_are_wrapped_at_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = parse({"models": [{"name": "a", "path": "/" + "x" * 90, "kv_cache_gb": 100000}]})
    console = module.Console(force_terminal=True, width=80, color_system=None)
    assert not module.passes(settings, module.this_machine(settings.quota), console)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4
    assert max(map(len, lines)) <= 80


def test_the_stack_of_the_e2e_tests_passes_the_check() -> None:
    """A check that refuses what runs would be worse than none."""
    settings = parse(CONFIG)
    machine = module.this_machine(settings.quota, LOGICAL_CPUS)
    with module.Progress(module.Console(stderr=True)) as progress:
        found = module.check(settings, machine, progress, here=True).findings
    assert not module.has_errors(found), found


def test_no_instance_means_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert module.place(None, InstanceState("default", tmp_path)) is None
