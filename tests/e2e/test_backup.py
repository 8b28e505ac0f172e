"""The commands of docs/how-to/back-up-and-restore.md: HOME is emptied, and the same key works again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
import yaml

from serve_app.cluster.local.ports import reserved_block
from tests.cli.test_backup import commands
from tests.requires import requires
from tests.waiting import patient, wait_until

requires("linux")
pytestmark = pytest.mark.long

CONFIG = {"models": [{"name": "sim", "engine": "simulated"}], "quota": {"reserved_gb": 0}}
# half a minute and ten seconds on an idle machine
START_S = 300.0
END_S = 120.0
POLL_S = 0.2


class Operator:
    """A shell in `folder`, with a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        with reserved_block("127.0.0.1") as block:
            self.port = block.http
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_APP_", "XDG_"))
        }
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = clean | {"HOME": str(self.home), "PATH": programs}

    def run(self, command: str) -> str:
        """Run a command to its end; it must succeed."""
        done = subprocess.run(
            ["bash", "-euc", command], **self._where(), capture_output=True, timeout=patient(END_S), check=False
        )
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    @contextmanager
    def started(self, command: str, key: str | None = None) -> Iterator[str]:
        """The endpoint of `serve-app up`, once it answers to the key; yields the key, by default that of its file."""
        log = self.folder / "up.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-euc", f"exec {command} --port {self.port}"], **self._where(), stdout=output, stderr=output
            )
        try:

            def is_up() -> bool:
                assert process.poll() is None, log.read_text()
                return self.answers(key or self.kept_key())

            wait_until(is_up, START_S, "it answers", seen=log.read_text, poll_s=POLL_S)
            yield key or self.kept_key()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(patient(END_S))

    def answers(self, key: str) -> bool:
        try:
            headers = {"Authorization": f"Bearer {key}"}
            return (
                requests.get(f"http://127.0.0.1:{self.port}/ready", headers=headers, timeout=patient(END_S)).status_code
                == 200
            )
        except requests.RequestException:
            return False

    def kept_key(self) -> str:
        file = self.home / ".local/state/serve-app/default/api_key"
        return file.read_text().strip() if file.exists() else "none-yet"

    def _where(self) -> dict[str, object]:
        return {"cwd": self.folder, "env": self.environment, "text": True}


def test_the_same_key_works_after_a_loss_of_home(tmp_path: Path) -> None:
    back_up, restore, start = commands()
    operator = Operator(tmp_path)
    operator.home.mkdir()
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(CONFIG))
    with operator.started("serve-app up --config my.yaml") as key:
        operator.run(back_up)
        assert operator.run("serve-app down").endswith("default: ended\n")
    shutil.rmtree(operator.home)
    (tmp_path / "my.yaml").unlink()

    operator.home.mkdir()
    operator.run(restore)
    with operator.started(start, key):
        body = {"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = requests.post(
            f"http://127.0.0.1:{operator.port}/v1/chat/completions",
            headers={"Authorization": f"Bearer {key}"},
            json=body,
            timeout=patient(END_S),
        )
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert operator.kept_key() == key
        assert not operator.answers("sk-another-0123456789")
