"""What is known of a model before it is loaded, with huggingface_hub's own client against a hub on the loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine.start.model_lookup import ModelFacts, look_up
from serve_app.engine.tiny_model import ensure_tiny_model
from serve_app.settings import ModelSettings
from tests.fakes.hub import Hub

CONFIG = json.dumps({"max_position_embeddings": 77}).encode()
TOKENIZER = json.dumps({"chat_template": "{{ messages }}"}).encode()
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
FILES = {
    "README.md": b"about it",
    "config.json": CONFIG,
    "tokenizer_config.json": TOKENIZER,
    "model-1.safetensors": bytes(3_000),
    "model-2.safetensors": b"2" * 4_000,
    "pytorch_model.bin": bytes(7_100),
}
ASK = """
import json, dataclasses, sys
from serve_app.engine.start.model_lookup import look_up
from serve_app.settings import ModelSettings
for path in sys.argv[1:]:
    print(json.dumps(dataclasses.asdict(look_up(ModelSettings(name="a", path=path)))))
"""
DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
snapshot_download(sys.argv[1], allow_patterns=sys.argv[2:])
"""
ANSWER_S = 100.0  # of a Python that imports the client; two seconds on an idle core


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub({"org/open": FILES, "org/gated": FILES}, gated=["org/gated"], broken=["org/broken"]) as running:
        yield running


def asked(home: Path, hub: Hub, *paths: str, **environment: str) -> list[dict[str, Any]]:
    """The facts of these models, by a process of its own: the client reads its environment once."""
    return [json.loads(line) for line in run(home, hub, ASK, *paths, **environment).splitlines()]


def run(home: Path, hub: Hub, program: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    given = hub.environment(home, **environment)
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_hub_s_answers_are_distinguished(hub: Hub, tmp_path: Path) -> None:
    paths = ("org/open", "org/gated", "org/absent", "not/an/id", "org/broken")
    opened, gated, absent, nonsense, broken = asked(tmp_path, hub, *paths)
    assert opened == {
        "problem": None,
        "detail": "",
        "weights_bytes": 7_000,
        "config": {"max_position_embeddings": 77},
        "has_template": True,
    }
    found = [one["problem"] for one in (gated, absent, nonsense, broken)]
    assert found == ["gated", "no_such_model", "not_an_id", "hub_unreachable"]
    assert "503" in broken["detail"]
    assert not [file for file in tmp_path.rglob("*") if file.suffix == ".safetensors"]


def test_what_vllm_has_downloaded_needs_no_hub(hub: Hub, tmp_path: Path) -> None:
    """It leaves out what it does not need, and the client then calls the folder incomplete."""
    run(tmp_path, hub, DOWNLOAD, "org/open", "*.json", "*.safetensors")
    (found,) = asked(tmp_path, hub, "org/open", HF_HUB_OFFLINE="1")
    assert (found["problem"], found["weights_bytes"], found["has_template"]) == (None, 7_000, True)


def test_a_download_that_lacks_weights_is_not_taken_for_a_model(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/sharded"] = FILES | {"model.safetensors.index.json": INDEX}
    run(tmp_path, hub, DOWNLOAD, "org/sharded", "*.json", "model-1.safetensors")
    (found,) = asked(tmp_path, hub, "org/sharded", HF_HUB_OFFLINE="1")
    assert found["problem"] == "offline"


def of(path: Path | str) -> ModelFacts:
    return look_up(ModelSettings(name="a", path=str(path)))


def test_a_folder_is_looked_into(tmp_path: Path) -> None:
    assert of(tmp_path / "absent").problem == "no_such_folder"
    assert of(tmp_path).problem == "not_a_model"
    (tmp_path / "config.json").write_text("[")
    assert of(tmp_path).problem == "not_a_model"
    (tmp_path / "config.json").write_bytes(CONFIG)
    assert of(tmp_path).problem == "no_weights"
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert of(tmp_path) == ModelFacts(None, "", 3, {"max_position_embeddings": 77}, False)
    (tmp_path / "pytorch_model.bin").write_bytes(b"the same in another format")
    assert of(tmp_path).weights_bytes == 3
    (tmp_path / "model.safetensors.index.json").write_bytes(INDEX)
    assert of(tmp_path).problem == "no_weights"
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert of(tmp_path).has_template is True


def test_the_built_in_model_passes_as_a_folder_of_its_own() -> None:
    found = of(ensure_tiny_model())
    assert (found.problem, found.has_template) == (None, True)
    assert of("tiny").has_template
    assert shape_in(of("tiny").config) == shape_in(found.config)


def shape_in(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """A configuration without the ids of tokens."""
    return {name: value for name, value in (config or {}).items() if "token_id" not in name}
