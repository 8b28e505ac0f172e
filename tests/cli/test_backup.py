"""By docs/how-to/back-up-and-restore.md a generated key survives the loss of HOME; tests/e2e has the whole way."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from serve_app.cli import keys
from serve_app.cluster.local import InstanceState
from serve_app.settings import Settings
from tests.requires import requires

requires("linux")

DOCUMENT = Path(__file__).parents[2] / "docs/how-to/back-up-and-restore.md"


def commands() -> tuple[str, str, str]:
    """To back up, to put the key back, to start. `tests/store` tries the copy of the store."""
    lines = re.findall(r"^\$ (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    back_up, restore, start = [line for line in lines if not line.startswith("python3 -c ")]
    return back_up, restore, start


def test_a_generated_key_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    for name in ("SERVE_APP_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    home.mkdir()
    Path("my.yaml").write_text("models: []\n")

    def resolved() -> str | None:
        state = InstanceState("default")
        state.create()
        return keys.resolve(Settings(), state).key

    back_up, restore, start = commands()
    key = resolved()
    subprocess.run(["bash", "-euc", back_up], check=True)
    shutil.rmtree(home)
    home.mkdir()
    subprocess.run(["bash", "-euc", restore], check=True)
    assert resolved() == key
    assert stat.S_IMODE(Path("backup").stat().st_mode) == 0o700
    assert Path(start.rpartition(" ")[2]).is_file(), "the configuration that is started is the one backed up"
