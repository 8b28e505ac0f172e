"""deploy/serve-app.service: what systemd says of it, and that it waits for our own end."""

from __future__ import annotations

import configparser
import subprocess
from pathlib import Path

from serve_app.cli import up
from serve_app.cluster.local import TERM_GRACE_S
from tests.requires import requires

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "serve-app.service"
INSTALLED = "/opt/serve-app"


def service() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(UNIT)
    return parser["Service"]


def test_systemd_has_nothing_to_say_about_the_unit(tmp_path: Path) -> None:
    requires("systemd-analyze")
    unit_file = tmp_path / UNIT.name
    unit_file.write_text(UNIT.read_text().replace(INSTALLED, str(ROOT)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit_file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if UNIT.stem in line]
    assert ours == []
    assert done.returncode == 0, done.stderr
    unit_file.write_text(unit_file.read_text().replace("KillMode=mixed", "KilMode=mixed"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit_file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "KilMode" in done.stderr


def test_it_waits_longer_than_serve_app_takes_to_end_and_signals_it_alone() -> None:
    assert service()["KillMode"] == "mixed"
    assert float(service()["TimeoutStopSec"]) > up.SHUTDOWN_S + 10 * TERM_GRACE_S
    assert service()["Restart"] == "on-failure"


def test_it_is_not_root_and_keeps_no_secret_in_the_unit() -> None:
    assert service()["User"] == "serve-app"
    assert service()["EnvironmentFile"].startswith("-/etc/")
    assert "TOKEN=" not in service()["Environment"]
    # what `serve-app up` is given exists
    program, *arguments = service()["ExecStart"].split()
    assert (ROOT / Path(program).relative_to(INSTALLED)).exists()
    assert arguments[0] == "up"
