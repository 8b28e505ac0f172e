"""HAProxy's wrapper: what it takes out of Serve's configuration, and when it refuses to start."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from serve_app.errors import ConfigError
from serve_app.system import haproxy

CONFIGURATION = f"""defaults
    option splice-request
    option splice-response
frontend prometheus
    bind :{haproxy.METRICS_PORT}
    mode http
frontend http_frontend
    bind 127.0.0.1:8000
listen stats
  bind *:{haproxy.STATS_PORT}
  stats enable
"""


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The HAProxy wrapper around a program that prints its arguments."""
    binary = tmp_path / "a haproxy"
    binary.write_text('#!/bin/sh\necho "$0 $$ $@"\n')
    binary.chmod(0o700)
    monkeypatch.setattr(haproxy, "haproxy_binary", lambda: binary)
    return haproxy.write_wrapper(tmp_path)


def test_haproxy_opens_no_statistics_to_the_network(wrapper: Path, tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIGURATION)
    process = subprocess.Popen([wrapper, "-db", "-f", str(config), "-sf", "1 2"], stdout=subprocess.PIPE, text=True)
    output = process.communicate()[0]
    # HAProxy itself runs under the process id Serve knows, with Serve's arguments
    program = str(tmp_path / "a haproxy").split()
    assert output.split() == [*program, str(process.pid), "-db", "-f", str(config), "-sf", "1", "2"]
    binds = [line.strip() for line in config.read_text().splitlines() if "bind" in line]
    assert binds == [
        f"bind unix@{tmp_path}/m.sock mode 600",
        "bind 127.0.0.1:8000",
        f"bind unix@{tmp_path}/s.sock mode 600",
    ]


def test_haproxy_splices_no_requests_and_keeps_the_operators_headers_to_the_operator(
    wrapper: Path, tmp_path: Path
) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIGURATION)
    subprocess.run([wrapper, "-f", str(config)], check=True, capture_output=True)
    text = config.read_text()
    assert "splice-request" not in text
    assert "splice-response" in text
    frontend = text.partition("frontend http_frontend")[2].partition("listen stats")[0]
    assert "http-request del-header x-request-timeout-seconds" in frontend
    assert "http-request del-header x-request-disconnect-disabled" in frontend


def test_haproxy_does_not_run_with_statistics_it_could_not_close(wrapper: Path, tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(f"listen stats\n  bind *:{haproxy.STATS_PORT} ssl\n")
    done = subprocess.run([wrapper, "-f", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "open to all" in done.stderr


def test_haproxy_itself_understands_the_mended_configuration(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        f"defaults\n    mode http\n    timeout connect 5s\n    timeout client 5s\n    timeout server 5s\n"
        f"    option splice-request\nfrontend http_frontend\n    bind 127.0.0.1:8000\n    default_backend routers\n"
        f"backend routers\n    server one 127.0.0.1:1\nlisten stats\n  bind *:{haproxy.STATS_PORT}\n  stats enable\n"
    )
    wrapper = haproxy.write_wrapper(tmp_path)
    done = subprocess.run([wrapper, "-c", "-f", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[WARNING]" not in done.stderr
    assert "option srvtcpka" in config.read_text()


def test_what_haproxy_answers_by_itself_is_an_error_as_openai_writes_it(wrapper: Path, tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIGURATION.replace("defaults\n", "defaults\n    errorfile 502 /tmp/serve/500.http\n"))
    subprocess.run([wrapper, "-f", str(config)], check=True, capture_output=True)
    files = dict(line.split()[1:] for line in config.read_text().splitlines() if " errorfile " in line)
    wanted = ("400", "404", "408", "429", "500", "502", "503", "504")
    assert files == {status: f"{tmp_path}/error{status}.http" for status in wanted}
    head, _, body = Path(files["502"]).read_bytes().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: application/json\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["error"]["code"] == "router_lost"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CONFIGURATION.replace("frontend http_frontend", "frontend http"), "clients would not be bounded"),
        (CONFIGURATION.replace("defaults\n", "defaults all\n"), "clients would not be bounded"),
        (
            CONFIGURATION + "backend b\n    http-request return status 404 content-type text/plain string no\n",
            "answered in text",
        ),
    ],
)
def test_haproxy_does_not_run_with_a_template_that_cannot_be_mended(
    wrapper: Path, tmp_path: Path, template: str, reason: str
) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(template)
    done = subprocess.run([wrapper, "-f", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"{reason}: the template of Ray Serve has changed" in done.stderr


def test_the_endpoint_s_host_is_haproxy_s_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    for host, bound in ((None, "127.0.0.1:8000"), ("0.0.0.0", "*:8000"), ("10.1.2.3", "10.1.2.3:8000")):
        config.write_text(f"{CONFIGURATION}frontend grpc\n    bind 127.0.0.1:9000\n")
        wrapper = haproxy.write_wrapper(tmp_path, host=host)
        wrapper.write_text(wrapper.read_text().replace(str(haproxy.haproxy_binary()), "true"))
        subprocess.run([wrapper, "-f", str(config)], check=True)
        binds = [line.split()[1] for line in config.read_text().splitlines() if " bind " in line]
        assert binds[1:3] == [bound, f"unix@{tmp_path}/s.sock"]
        assert binds[3] == "127.0.0.1:9000"


def test_sources_are_read_from_the_environment_and_refused_by_name() -> None:
    assert haproxy.Sources.of({}) == haproxy.Sources(512, ())
    given = {haproxy.PER_SOURCE_VARIABLE: "40", haproxy.TRUSTED_VARIABLE: "10.0.0.0/8, 192.0.2.7 fd00::/8"}
    assert haproxy.Sources.of(given) == haproxy.Sources(40, ("10.0.0.0/8", "192.0.2.7/32", "fd00::/8"))
    for name, value in (
        (haproxy.PER_SOURCE_VARIABLE, "0"),
        (haproxy.PER_SOURCE_VARIABLE, "4096"),
        (haproxy.PER_SOURCE_VARIABLE, "many"),
        (haproxy.TRUSTED_VARIABLE, "proxy.example"),
    ):
        with pytest.raises(ConfigError) as refused:
            haproxy.Sources.of({name: value})
        assert refused.value.param == name
