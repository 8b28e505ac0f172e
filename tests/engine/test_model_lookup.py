"""What is known of a model before it is loaded, with huggingface_hub's own client against a hub on the loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine.model_lookup import ModelFacts, look_up
from serve_app.engine.tiny_model import ensure_tiny_model
from serve_app.settings import ModelSettings

COMMIT = "0" * 40
CONFIG = json.dumps({"max_position_embeddings": 77}).encode()
TOKENIZER = json.dumps({"chat_template": "{{ messages }}"}).encode()
FILES = {"config.json": CONFIG, "tokenizer_config.json": TOKENIZER}
SIZES = {"model-1.safetensors": 3_000, "model-2.safetensors": 4_000}
ASK = """
import json, dataclasses, sys
from serve_app.engine.model_lookup import look_up
from serve_app.settings import ModelSettings
for path in sys.argv[1:]:
    print(json.dumps(dataclasses.asdict(look_up(ModelSettings(name="a", path=path)))))
"""
ANSWER_S = 100.0  # of a Python that imports the client; two seconds on an idle core


class Hub(BaseHTTPRequestHandler):
    """The answers of the hub for a model that is open, one that is gated, and all others, which do not exist."""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if "org/gated" in path:
            if path.endswith("auth-check"):
                return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
            return self._send(200, self._about("org/gated"), {}, with_body)
        if "org/broken" in path:
            return self._send(503, b"{}", {"X-Error-Message": "under repair"}, with_body)
        if "org/open" not in path:
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
        if "/resolve/" in path:
            body = FILES[path.rpartition("/")[2]]
            return self._send(200, body, {"X-Repo-Commit": COMMIT, "ETag": f'"{len(body)}"'}, with_body)
        return self._send(200, b"{}" if path.endswith("auth-check") else self._about("org/open"), {}, with_body)

    def _about(self, name: str) -> bytes:
        sizes = SIZES | {file: len(body) for file, body in FILES.items()}
        siblings = [{"rfilename": file, "size": size} for file, size in sizes.items()]
        return json.dumps({"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0}).encode()

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing into the test's output."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def asked(home: Path, endpoint: str, *paths: str, **environment: str) -> list[dict[str, Any]]:
    """The facts of these models, by a process of its own: the client reads its environment once."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    given |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", ASK, *paths], env=given, capture_output=True, text=True, timeout=ANSWER_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_hub_s_answers_are_told_apart(hub: str, tmp_path: Path) -> None:
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


def test_offline_and_without_a_hub_are_told_apart(tmp_path: Path) -> None:
    (offline,) = asked(tmp_path, "http://127.0.0.1:1", "org/open", HF_HUB_OFFLINE="1")
    (away,) = asked(tmp_path, "http://127.0.0.1:1", "org/open")
    assert (offline["problem"], away["problem"]) == ("offline", "hub_unreachable")
    assert away["detail"]


def test_what_is_in_the_cache_needs_no_hub(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--here"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_bytes(CONFIG)
    (snapshot / "model.safetensors").write_bytes(b"12345")
    (found,) = asked(tmp_path, "http://127.0.0.1:1", "org/here", HF_HUB_OFFLINE="1")
    assert (found["problem"], found["weights_bytes"], found["has_template"]) == (None, 5, False)


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
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert of(tmp_path).has_template is True


def test_the_built_in_model_passes_as_a_folder_of_its_own() -> None:
    found = of(ensure_tiny_model())
    assert (found.problem, found.has_template) == (None, True)
    assert of("tiny") == ModelFacts(has_template=True)
