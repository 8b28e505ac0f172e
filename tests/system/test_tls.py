"""TLS of the endpoint: HAProxy itself, behind our wrapper, with certificates made here."""

from __future__ import annotations

import http.client
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.errors import ConfigError
from serve_app.system import TLS_VARIABLES, Certificate, Tls, environment, haproxy
from serve_app.system.tls import PEM
from tests.requires import requires
from tests.system.certificates import NAME, self_signed
from tests.system.real_haproxy import WITHIN_S, Edge, Router, edge, routers
from tests.waiting import wait_until

requires("linux")


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return self_signed(tmp_path / "given")


@pytest.fixture
def router() -> Iterator[Router]:
    with routers("a") as (router_process,):
        yield router_process


@pytest.fixture
def haproxy_edge(tmp_path: Path, tls: Tls, router: Router) -> Iterator[Edge]:
    folder = tmp_path / "run"
    folder.mkdir()
    with edge(folder, tls=tls) as edge_process:
        edge_process.start(router)
        yield edge_process


def connected(haproxy_edge: Edge, certificate: str) -> http.client.HTTPSConnection:
    """A connection to whoever shows this certificate (PEM)."""
    trust = ssl.create_default_context(cadata=certificate)
    connection = http.client.HTTPSConnection("127.0.0.1", haproxy_edge.port, timeout=WITHIN_S, context=trust)
    plain = socket.create_connection(("127.0.0.1", haproxy_edge.port), WITHIN_S)
    connection.sock = trust.wrap_socket(plain, server_hostname=NAME)
    return connection


def is_shown(haproxy_edge: Edge, certificate: str) -> bool:
    try:
        connected(haproxy_edge, certificate).close()
    except ssl.SSLCertVerificationError:
        return False
    return True


def test_the_port_speaks_tls_and_nothing_in_the_clear(haproxy_edge: Edge, tls: Tls, router: Router) -> None:
    connection = connected(haproxy_edge, tls.certificate.read_text())
    status, _, body = haproxy_edge.asked(connection, "/v1/models", b"abc")
    assert (status, body) == (200, {"router": "a", "bytes": 3})
    assert haproxy_edge.ask("/in-the-clear")[0] == 0
    assert router.seen == ["/v1/models"]
    connection.close()


def test_a_new_certificate_is_taken_without_a_reload_and_without_a_lost_connection(
    haproxy_edge: Edge, tls: Tls
) -> None:
    old = tls.certificate.read_text()
    watch = Certificate(haproxy_edge.folder, tls)
    watch.check()
    connection = connected(haproxy_edge, old)
    assert haproxy_edge.asked(connection, "/before")[0] == 200
    front = haproxy_edge.front()

    self_signed(tls.key.parent)
    watch.check()
    assert is_shown(haproxy_edge, tls.certificate.read_text())
    assert not is_shown(haproxy_edge, old)
    assert haproxy_edge.asked(connection, "/after")[0] == 200  # on the connection of before
    assert haproxy_edge.front() == front
    connection.close()


def test_half_a_change_waits_for_the_other_half(haproxy_edge: Edge, tls: Tls, caplog: pytest.LogCaptureFixture) -> None:
    old = tls.certificate.read_text()
    key = tls.key.read_bytes()
    watch = Certificate(haproxy_edge.folder, tls)
    self_signed(tls.key.parent)
    new_key = tls.key.read_bytes()
    tls.key.write_bytes(key)
    for _ in range(3):
        watch.check()
    assert is_shown(haproxy_edge, old)
    assert len(caplog.records) == 1  # said once
    tls.key.write_bytes(new_key)
    watch.check()
    assert is_shown(haproxy_edge, tls.certificate.read_text())


def test_a_haproxy_that_starts_later_has_it_too_and_one_that_is_away_gets_it_when_it_is_back(
    haproxy_edge: Edge, tls: Tls, router: Router
) -> None:
    watch = Certificate(haproxy_edge.folder, tls)
    first = haproxy_edge.started[-1]
    first.kill()
    first.wait()
    self_signed(tls.key.parent)
    watch.check()
    haproxy_edge.start(router)
    assert is_shown(haproxy_edge, tls.certificate.read_text())
    watch.check()
    second = haproxy_edge.started[-1]
    haproxy_edge.start(router, reload=second)
    assert is_shown(haproxy_edge, tls.certificate.read_text())
    wait_until(lambda: second.poll() is not None, WITHIN_S, "the old one left")


def test_the_stand_in_of_a_haproxy_that_died_speaks_tls_as_well(haproxy_edge: Edge, tls: Tls) -> None:
    haproxy_edge.started[-1].kill()
    haproxy_edge.started[-1].wait()
    haproxy_edge.stand_in.check()
    wait_until(lambda: _answers(haproxy_edge, tls), WITHIN_S, "the stand-in answers")


def _answers(haproxy_edge: Edge, tls: Tls) -> bool:
    try:
        connection = connected(haproxy_edge, tls.certificate.read_text())
    except ConnectionError:
        return False
    try:
        return haproxy_edge.asked(connection, "/")[0] == 200
    finally:
        connection.close()


def test_the_file_with_the_key_is_for_its_owner_alone(haproxy_edge: Edge) -> None:
    assert stat.S_IMODE((haproxy_edge.folder / PEM).stat().st_mode) == 0o600


def test_haproxy_does_not_run_in_the_clear_where_the_template_cannot_be_mended(tmp_path: Path, tls: Tls) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text("defaults\nfrontend http_frontend\n    bind 127.0.0.1:8000 tfo\n")
    wrapper = haproxy.write_wrapper(tmp_path, tls=tls)
    done = subprocess.run([wrapper, "-f", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "would not be encrypted" in done.stderr


def test_files_that_are_wrong_are_refused_before_anything_starts(tmp_path: Path, tls: Tls) -> None:
    other = self_signed(tmp_path / "other")
    locked = self_signed(tmp_path / "locked", password=b"secret")
    text = tmp_path / "text"
    text.write_text("no certificate")
    wrong = [Tls(tls.certificate, other.key), locked, Tls(text, tls.key), Tls(tmp_path / "none", tls.key)]
    for files in wrong:
        with pytest.raises(ConfigError, match=r"http\.tls: .+\.pem") as refused:
            haproxy.write_wrapper(tmp_path, tls=files)
        assert refused.value.param == "http.tls"


def test_what_a_machine_s_environment_names_reaches_its_haproxy_and_its_supervisor(
    tmp_path: Path, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in tls.environment().items():
        monkeypatch.setenv(name, file)
    found = environment.common_environment("mark", tmp_path)
    assert Tls.of(found) == tls
    assert f" ssl crt {tmp_path / PEM} " in Path(found["RAY_SERVE_HAPROXY_BINARY_PATH"]).read_text()


def test_the_environment_of_a_machine_names_both_files_or_neither(tmp_path: Path) -> None:
    assert Tls.of({}) is None
    both = dict(zip(TLS_VARIABLES, ("/c.pem", "/k.pem"), strict=True))
    found = Tls.of(both)
    assert found == Tls(Path("/c.pem"), Path("/k.pem"))
    assert found.environment() == both
    for name in TLS_VARIABLES:
        with pytest.raises(ConfigError, match=name):
            Tls.of({one: file for one, file in both.items() if one != name})


def test_a_look_at_the_files_never_ends_the_node(
    tmp_path: Path, tls: Tls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = Certificate(tmp_path, tls)

    def full(folder: Path, pem: bytes) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("serve_app.system.tls.write_pem", full)
        held.check()
        held.check()
    assert sum("no space left" in one.getMessage() for one in caplog.records) == 2
    held.check()  # its file was never there, or is gone
    assert (tmp_path / "tls.pem").read_bytes() == tls.read()
