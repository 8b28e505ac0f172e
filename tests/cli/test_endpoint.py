"""Where a command goes, with which key, and what it says of an endpoint that cannot be asked."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from serve_app.cli.command_line import EndpointOptions
from serve_app.cli.endpoint import Endpoint, fetch, root_of
from serve_app.cluster.local import Instance, InstanceState
from serve_app.errors import BadRequest, ConfigError, Forbidden, ServeAppError, Unauthorized, Unavailable
from tests.cli.test_chat import KEY, reply, run, serve  # noqa: F401 - fixtures
from tests.requires import requires
from tests.system.certificates import self_signed

requires("linux")

Serve = Callable[[Callable[[BaseHTTPRequestHandler, Any], None]], str]
URL = "https://models.example"


def context_file(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "config" / "serve-app"
    folder.mkdir(parents=True)
    (folder / "contexts.yaml").write_text(text)


@pytest.mark.parametrize("url", [URL, f"{URL}/", f"{URL}/v1", f"{URL}/v1/"])
def test_a_url_means_the_same_with_and_without_v1(url: str) -> None:
    assert root_of(url) == URL
    assert EndpointOptions(url, KEY).endpoint() == Endpoint(URL, KEY)


def test_a_command_asks_the_same_path_below_either(run: Callable[..., Result], serve: Serve) -> None:  # noqa: F811
    asked: list[str] = []

    def answer(request: BaseHTTPRequestHandler, _: Any) -> None:
        asked.append(request.path)
        reply(request, 200, b'{"object": "list", "data": []}')

    url = serve(answer)
    for given in (url, f"{url}/v1"):
        assert run("keys", "list", "--url", given, "--key", KEY).exit_code == 0
    assert asked == ["/admin/keys", "/admin/keys"]


@pytest.mark.parametrize("url", ["models.example", "ftp://models.example", "http://", "http:///v1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:8000"):
        root_of(url)


def test_the_environment_names_the_endpoint_unless_an_instance_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_APP_URL", URL)
    assert EndpointOptions(URL, KEY).endpoint() == Endpoint(URL, KEY)
    state = InstanceState("one", tmp_path)
    state.create()
    state.write(Instance("one", "m", "/r", "127.0.0.1", 1, url="http://127.0.0.1:1"))
    named = EndpointOptions(URL, None, None, "one", str(tmp_path))
    assert named.endpoint() == Endpoint("http://127.0.0.1:1", None)
    assert named.repeated == " --instance one"
    elsewhere = EndpointOptions("http://other:1", KEY, None, "one", str(tmp_path))
    assert elsewhere.endpoint() == Endpoint("http://other:1", KEY)


def test_contexts_name_endpoints_with_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "night.key").write_text(f"{KEY}\n")
    (tmp_path / "night.key").chmod(0o600)
    night = f"  night: {{url: {URL}/v1, key_file: {tmp_path}/night.key, certificate: /c.pem}}\n"
    context_file(tmp_path, f"current: night\ncontexts:\n{night}  day: {{url: 'http://day:8000'}}\n")
    assert EndpointOptions().endpoint() == Endpoint(URL, KEY, "/c.pem")
    assert EndpointOptions(context="day", key="sk-other").endpoint() == Endpoint("http://day:8000", "sk-other")
    assert EndpointOptions(context="day").repeated == " --context day"
    assert EndpointOptions(instance="one").elsewhere() is None
    monkeypatch.setenv("SERVE_APP_API_KEY", "sk-of-another")
    assert EndpointOptions(key="sk-of-another").endpoint().key == KEY, "the context has a key of its own"
    assert EndpointOptions(key="sk-of-another", context="day").endpoint().key == "sk-of-another"
    with pytest.raises(ConfigError, match="no context 'noon', there is day, night"):
        EndpointOptions(context="noon").endpoint()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602])
def test_a_context_s_key_that_others_may_read_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "night.key"
    file.write_text(f"{KEY}\n")
    file.chmod(mode)
    context_file(tmp_path, f"contexts:\n  night: {{url: {URL}, key_file: {file}}}\n")
    with pytest.raises(ConfigError, match=f"mode 0{mode:o} lets others at the key; run: chmod 600 {file}"):
        EndpointOptions(context="night").endpoint()
    assert EndpointOptions(context="night", key="sk-given").endpoint().key == "sk-given", "the file is not asked"
    file.chmod(0o400)
    assert EndpointOptions(context="night").endpoint().key == KEY


def test_a_context_s_key_of_another_user_is_read_as_far_as_its_mode_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a secret that Kubernetes mounts: root's, with mode 0644."""
    file = tmp_path / "night.key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o644)
    context_file(tmp_path, f"contexts:\n  night: {{url: {URL}, key_file: {file}}}\n")
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert EndpointOptions(context="night").endpoint().key == KEY


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("contexts: [1]", "contexts: "),
        ("contexts: {a: {url: 'http://a', key: sk-1}}", "contexts.a.key: "),
        ("current: x", "no context 'x', there is none"),
        ("a: [", "contexts.yaml: "),
    ],
)
def test_a_wrong_file_of_contexts_is_one_line(
    run: Callable[..., Result],  # noqa: F811
    tmp_path: Path,
    text: str,
    reported: str,
) -> None:
    context_file(tmp_path, text)
    result = run("usage")
    assert result.exit_code == 2
    assert reported in result.stderr
    assert len(result.stderr.splitlines()) == 1


def error_body(message: str, code: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "x", "param": None, "code": code}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "headers", "kind", "reported"),
    [
        (401, error_body("no such key", "invalid_api_key"), {}, Unauthorized, "no such key.*--key"),
        (403, error_body("this key is not an operator's", "not_admin"), {}, Forbidden, "operator's key with --key"),
        (403, error_body("not this model", "model_not_allowed"), {}, BadRequest, "403: not this model"),
        (404, error_body("there is no /admin/x here", "unknown_url"), {}, BadRequest, "release without this route"),
        (308, b"", {"Location": "https://b.example/"}, BadRequest, "redirects to https://b.example/"),
        (503, error_body("away", "no_quota"), {"Retry_After": "2"}, Unavailable, "503: away; try again in 2 s"),
    ],
)
def test_an_answer_that_is_no_success_is_reported_in_plain_words(
    serve: Serve,  # noqa: F811
    status: int,
    body: bytes,
    headers: dict[str, str],
    kind: type[ServeAppError],
    reported: str,
) -> None:
    url = serve(lambda request, _: reply(request, status, body, **headers))
    with pytest.raises(kind, match=reported):
        fetch(Endpoint(url, KEY), "GET", "/admin/x")


def test_a_code_of_the_answer_is_the_error_s(serve: Serve) -> None:  # noqa: F811
    url = serve(lambda request, _: reply(request, 503, error_body("away", "no_quota")))
    with pytest.raises(Unavailable) as refused:
        fetch(Endpoint(url, KEY), "GET", "/admin/x")
    assert refused.value.code == "no_quota"


def test_a_key_does_not_follow_a_redirect(serve: Serve) -> None:  # noqa: F811
    asked: list[str | None] = []

    def answer(request: BaseHTTPRequestHandler, _: Any) -> None:
        asked.append(request.headers["Authorization"])
        reply(request, 307, b"", Location=f"{other}/admin/x")

    other = serve(answer)
    with pytest.raises(BadRequest, match="redirects"):
        fetch(Endpoint(serve(answer), KEY), "GET", "/admin/x")
    assert asked == [f"Bearer {KEY}"]


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port at which each connection gets this answer; its number."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    link, _ = server.accept()
                    with link, contextlib.suppress(OSError):
                        answer(link)

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_ends_without_an_answer_may_want_tls() -> None:
    with listening(lambda link: None) as port, pytest.raises(Unavailable, match="is it https://"):
        fetch(Endpoint(f"http://127.0.0.1:{port}", KEY), "GET", "/ready")


def test_a_port_without_tls_is_called_so(serve: Serve) -> None:  # noqa: F811
    url = serve(lambda request, _: reply(request, 200, b"{}"))
    with pytest.raises(ConfigError, match="does not speak TLS"):
        fetch(Endpoint(url.replace("http://", "https://"), KEY), "GET", "/ready")


def test_a_certificate_that_nobody_has_signed_is_not_trusted_and_the_remedy_is_named(tmp_path: Path) -> None:
    ours = self_signed(tmp_path / "ours")
    other = self_signed(tmp_path / "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours.certificate, ours.key)

    def shake(link: socket.socket) -> None:
        context.wrap_socket(link, server_side=True).close()

    with listening(shake) as port:
        url = f"https://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=r"is not trusted.*REQUESTS_CA_BUNDLE"):
            fetch(Endpoint(url, KEY), "GET", "/ready")
        with pytest.raises(ConfigError, match="shows another certificate than"):
            fetch(Endpoint(url, KEY, str(other.certificate)), "GET", "/ready")
        with pytest.raises(ConfigError, match="cannot be read"):
            fetch(Endpoint(url, KEY, str(tmp_path / "none.pem")), "GET", "/ready")


def test_a_host_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(Unavailable, match=r"^modles\.example: there is no host of this name"):
        fetch(Endpoint("http://modles.example:8000", KEY), "GET", "/ready")
