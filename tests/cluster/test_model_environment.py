"""An engine gets the Hugging Face variables of its own node's start (docs/how-to/use-a-hub-and-caches.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_app.cluster.local import node
from serve_app.cluster.local.ports import reserved_block
from serve_app.engine.start import environment as of_engine
from serve_app.settings import application, parse
from serve_app.system import environment
from tests.requires import requires

requires("linux")

GIVEN = {"HF_TOKEN": "hf_secret", "HF_HOME": "/shared/models", "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://mirror"}


def test_a_machine_of_a_cluster_has_those_of_its_start(tmp_path: Path) -> None:
    built = environment.machine_environment(
        GIVEN, mark="m", token_file=tmp_path / "token", run_dir=tmp_path, ip="127.0.0.1"
    )
    assert GIVEN.items() <= built.items()


def test_an_instance_has_those_of_the_shell_that_starts_it(tmp_path: Path) -> None:
    with reserved_block("127.0.0.1") as block:
        built = node.usable_environment(GIVEN) | node.node_environment("m", "token", tmp_path, block)
    assert GIVEN.items() <= built.items()


def test_an_engine_s_own_settings_touch_none_of_them() -> None:
    settings = of_engine.common_environment(1, 1, 1.0) | of_engine.cpu_environment([0, 1], 1)
    assert not [name for name in settings if name.startswith("HF_")]


def test_a_deploy_sends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    declared = json.dumps(application(parse({"models": [{"name": "a", "path": "org/a"}]})))
    assert not [value for value in GIVEN.values() if len(value) > 1 and value in declared]
    assert "runtime_env" not in declared
    assert "env_vars" not in declared
