"""The nginx configuration of docs/how-to/put-a-proxy-in-front.md (but for ports and files) before a stack."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from serve_app.cluster.local.ports import reserved_block
from serve_app.system.haproxy import TRUSTED_VARIABLE
from tests.e2e import stack as stacks
from tests.e2e.observe import ABORT_S, FILL_S, Observer
from tests.e2e.stack import REQUEST_TIMEOUT_S, Stack
from tests.requires import requires
from tests.system.certificates import NAME, self_signed
from tests.waiting import patient, wait_until

requires("linux")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:Unverified HTTPS request")]  # it is self-signed

MODEL = "sim"
STEP_S = 0.05
TOKENS = 40
CONFIG: dict[str, Any] = {
    "models": [{"name": MODEL, "engine": "simulated", "max_model_len": 8192, "simulated": {"decode_step_s": STEP_S}}]
}
MAIN = """daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
access_log off;
{server}}}
"""
UP_S = 30.0  # for nginx to listen: milliseconds on an idle machine


@contextlib.contextmanager
def nginx(folder: Path, upstream: str) -> Iterator[str]:
    """The documented proxy before `upstream`, host and port; yields its URL."""
    text = (Path(__file__).parents[2] / "docs/how-to/put-a-proxy-in-front.md").read_text()
    (server,) = re.findall(r"^```nginx\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    tls = self_signed(folder / "tls")
    with reserved_block("127.0.0.1") as block:
        port = block.http
    changed = {
        "127.0.0.1:8000": upstream,
        "listen 443": f"listen 127.0.0.1:{port}",
        "/etc/nginx/serve-app.pem": str(tls.certificate),
        "/etc/nginx/serve-app.key": str(tls.key),
    }
    for documented, ours in changed.items():
        assert documented in server
        server = server.replace(documented, ours)
    config = folder / "nginx.conf"
    config.write_text(MAIN.format(folder=folder, server=server))
    process = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(config)], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: listens(port) or process.poll() is not None, UP_S, "nginx listens, or has ended")
        assert process.poll() is None, process.communicate()[1]
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(patient(UP_S))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack without the proxy, which it trusts."""
    requires("nginx")  # not at the top: a machine without it has to be able to collect this module
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRUSTED_VARIABLE, "127.0.0.1")
        with stacks.own(tmp_path_factory.mktemp("proxied"), CONFIG, "proxied") as started:
            yield started


@pytest.fixture(scope="module")
def proxy(direct: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with nginx(tmp_path_factory.mktemp("nginx"), direct.base_url.removeprefix("http://")) as url:
        yield url


def post(proxy: str, direct: Stack, body: dict[str, Any], **options: Any) -> requests.Response:
    headers = direct.headers() | {"Host": NAME, "X-Request-Id": "trace-17"}
    given: dict[str, Any] = {"headers": headers, "json": body, "verify": False, "timeout": REQUEST_TIMEOUT_S}
    return requests.post(f"{proxy}/v1/completions", **given, **options)


def body(tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "a", "max_tokens": tokens, "ignore_eos": True} | more


def test_tokens_come_one_by_one(proxy: str, direct: Stack) -> None:
    """The engine makes one each STEP_S; a proxy that buffers would hand them over at the end, all at once."""
    with post(proxy, direct, body(stream=True), stream=True) as answer:
        came = [time.monotonic() for line in answer.iter_lines(chunk_size=1) if line.startswith(b"data: {")]
    assert len(came) >= TOKENS
    assert came[-1] - came[0] > TOKENS * STEP_S / 2
    assert answer.headers["x-request-id"] == "trace-17"


def test_a_client_that_leaves_ends_its_request(proxy: str, direct: Stack) -> None:
    observer = Observer(direct)
    with observer.ends(MODEL, "cancelled_running"):
        with post(proxy, direct, body(8000, stream=True), stream=True) as answer:
            lines = answer.iter_lines(chunk_size=1)  # kept: the connection is closed with the iterator
            next(lines)
            wait_until(lambda: observer.running(MODEL), FILL_S, "sequences running", wanted=1)
        wait_until(lambda: observer.figures(MODEL), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


def test_errors_and_large_bodies_are_the_routers_own(proxy: str, direct: Stack) -> None:
    large = post(proxy, direct, body(prompt="a" * 7_000_000))
    assert len(large.headers["x-serve-app-request-id"]) == 32
    assert post(proxy, direct, body(model="unknown")).json()["error"]["code"] == "model_not_found"


def test_connections_are_kept_and_used_again(proxy: str, direct: Stack) -> None:
    answers = [post(proxy, direct, body(1)) for _ in range(20)]
    assert [answer.status_code for answer in answers] == [200] * 20
    assert json.loads(answers[-1].text)["usage"]["completion_tokens"] == 1
