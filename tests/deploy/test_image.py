"""deploy/Dockerfile: what it promises, and (long) its steps on a root file system of Debian's packages."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import yaml

from serve_app.cluster.local.ports import reserved_block
from serve_app.cluster.local.state import Instance, InstanceState
from serve_app.system import preflight
from tests.deploy import dockerfile
from tests.system.certificates import self_signed
from tests.waiting import patient, wait_until

ROOT = Path(__file__).resolve().parents[2]
STAGES = dockerfile.read((ROOT / "deploy" / "Dockerfile").read_text())
LAST = STAGES[-1]
READY_S = 240.0  # from an empty home to the first answer takes 40 s on an idle machine
REQUEST_S = 30.0
KEY_FILE = "upper/home/serve-app/.local/state/serve-app/default/api_key"
END_S = 60.0  # what deploy/Dockerfile tells `docker stop` to wait


def test_every_step_is_read_and_the_last_stage_is_the_systems() -> None:
    assert [(stage.base, stage.name) for stage in STAGES] == [
        ("debian:bookworm-slim", "system"),
        ("system", "build"),
        ("system", ""),
    ]
    with pytest.raises(ValueError, match="before the first FROM"):
        dockerfile.read("RUN true")


def test_it_runs_as_a_numbered_user_who_owns_what_is_a_volume() -> None:
    """Kubernetes' runAsNonRoot takes a number only; a volume that root owns could not be written."""
    user = re.fullmatch(r"(\d+):\1", LAST.last("USER").rest)
    assert user is not None
    assert int(user[1]) > 0
    assert f"useradd --uid {user[1]} --create-home" in LAST.last("RUN").rest
    environment = LAST.environment()
    assert LAST.last("VOLUME").words == [environment["HOME"], environment["HF_HOME"]]
    assert f"install -d -o serve-app -g serve-app {environment['HF_HOME']}" in LAST.last("RUN").rest


def test_its_first_process_is_ours_and_gets_the_signals() -> None:
    assert LAST.last("CMD").words[:2] == ["serve-app", "up"]
    assert LAST.last("CMD").rest.startswith("["), "a shell would be the first process, and pass no signal on"
    assert LAST.last("STOPSIGNAL").rest == "SIGTERM"


def test_everything_is_installed_by_the_lock_file_and_the_project_is_what_other_machines_get() -> None:
    runs = [step.rest for stage in STAGES for step in stage.steps if step.name == "RUN"]
    assert not [run for run in runs if "pip install" in run]
    assert [run for run in runs if 'scripts/install.py --device "$DEVICE"' in run]
    copied = {word for step in STAGES[1].steps if step.name == "COPY" for word in step.words[:-1]}
    mounts: dict[str, str] = yaml.safe_load((ROOT / "cluster.yaml").read_text())["file_mounts"]
    assert copied == {local for there, local in mounts.items() if there.startswith("~/serve-app/")}
    # scripts in a .venv carry its path
    assert LAST.last("COPY").words == [STAGES[1].last("WORKDIR").rest] * 2


def test_both_devices_can_be_built_and_nothing_secret_is_in_a_layer() -> None:
    assert {"ARG DEVICE=cpu"} == {
        f"ARG {step.rest}" for stage in STAGES for step in stage.steps if "DEVICE=" in step.rest and step.name == "ARG"
    }
    assert preflight.choose_device("cpu") == "cpu"
    names = [step.rest for stage in STAGES for step in stage.steps if step.name in ("ARG", "ENV")]
    assert not [name for name in names if re.search("token|key|secret|password", name, re.IGNORECASE)]


class _Healthz(http.server.BaseHTTPRequestHandler):
    """Answers only the path of Serve's health check."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/-/healthz" and self.server.is_healthy else 503)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_its_health_is_asked_where_the_instance_serves_with_and_without_tls(tmp_path: Path, scheme: str) -> None:
    command = json.loads(LAST.last("HEALTHCHECK").rest.removeprefix("CMD "))
    assert command[0] == "python3"
    state = InstanceState(state_dir=tmp_path / ".local" / "state" / "serve-app")
    state.create()
    environment = {"HOME": str(tmp_path), "http_proxy": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1"}

    def check() -> int:
        return subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True).returncode

    assert check(), "nothing has been started"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Healthz) as server:
        if scheme == "https":
            tls = self_signed(tmp_path / "tls")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls.certificate, tls.key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        port = server.server_address[1]
        state.write(Instance("default", "mark", "", "0.0.0.0", port, url=f"{scheme}://127.0.0.1:{port}"))
        server.is_healthy = True  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert check() == 0
        server.is_healthy = False  # type: ignore[attr-defined]
        assert check()
        server.shutdown()
    assert check(), "nothing listens"


@pytest.mark.long
def test_the_image_serves_as_its_user_and_ends_in_order_as_the_first_process(image: Path, tmp_path: Path) -> None:
    environment = LAST.environment()
    user = LAST.last("USER").rest
    folder = LAST.last("WORKDIR").rest
    command = dockerfile.command_in(image, LAST.last("CMD").words, folder=folder, user=user, layer=tmp_path)
    log = tmp_path / "up.log"
    with reserved_block("127.0.0.1") as block, log.open("wb") as output:
        command[-1] += f" --port {block.http}"
        url = f"http://127.0.0.1:{block.http}"
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            env=dockerfile.environment_in(environment),
            stdout=output,
            stderr=output,
        )
        try:
            _until_200(lambda: requests.get(f"{url}/-/healthz", timeout=patient(REQUEST_S)), process, log)
            (first,) = psutil.Process(process.pid).children()  # of `unshare`: process 1 of the namespace
            # the endpoint is healthy before its model is
            headers = {"Authorization": f"Bearer {(tmp_path / KEY_FILE).read_text().strip()}"}
            body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8}
            _until_200(
                lambda: requests.post(f"{url}/v1/completions", headers=headers, json=body, timeout=patient(REQUEST_S)),
                process,
                log,
            )
            ready_s = time.monotonic() - began
            # else it is a start that is interrupted
            wait_until(lambda: "Ctrl-C ends everything" in log.read_text(), READY_S, "it is up", seen=log.read_text)
            family = [first, *first.children(recursive=True)]
            assert {one.uids().real for one in family} == {10001}
            ended = time.monotonic()
            os.kill(first.pid, signal.SIGTERM)
            status = process.wait(patient(END_S))
            print(f"ready after {ready_s:.0f} s, ended {time.monotonic() - ended:.1f} s after SIGTERM", flush=True)
        finally:
            process.kill()
            process.wait()
    assert status == 0, log.read_text()
    assert "has ended" in log.read_text()
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def _until_200(ask: Callable[[], requests.Response], process: subprocess.Popen[bytes], log: Path) -> None:
    """Bounded by READY_S."""

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return ask().status_code == 200
        except requests.RequestException:
            return False

    wait_until(answers, READY_S, "an answer", seen=log.read_text, poll_s=1.0)
