"""`serve-app chat` with a server of the tests: what is printed, what is remembered, what is said when it goes wrong."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli import chat
from serve_app.cli.commands import app
from serve_app.cli.endpoint import Endpoint, request, session
from serve_app.cluster.local import Instance, InstanceState
from serve_app.errors import ConfigError, Unavailable
from tests.requires import requires
from tests.system.certificates import self_signed

requires("linux")

KEY = "sk-0123456789abcdef"
Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any] | None], None]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    def invoke(*arguments: str, text: str | None = None) -> Result:
        return CliRunner().invoke(
            app, list(arguments), input=text, env={"SERVE_APP_STATE": str(tmp_path), "COLUMNS": "200"}
        )

    return invoke


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Start an HTTP server that answers with the given function; returns its URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self, None)

            do_DELETE = do_GET

            def do_POST(self) -> None:
                answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null"))

            def log_message(self, format: str, *args: object) -> None:
                """Nothing into the test's output."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def reply(request: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(body)


def sse(*texts: str, done: bool = True) -> bytes:
    parts = [json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}) for text in texts]
    return "".join(f"data: {part}\n\n" for part in [*parts, *(["[DONE]"] if done else [])]).encode()


def echo(seen: list[Any]) -> Answer:
    """A server that lists one model and repeats what it is told, word by word."""

    def answer(request: BaseHTTPRequestHandler, body: dict[str, Any] | None) -> None:
        if request.headers["Authorization"] != f"Bearer {KEY}":
            reply(request, 401, b'{"error": {"message": "no such key"}}')
        elif body is None:
            reply(request, 200, b'{"data": [{"id": "tiny"}, {"id": "other"}]}')
        else:
            seen.append(body)
            words = body["messages"][-1]["content"].split(" ")
            reply(request, 200, sse(*[f"{word}-" for word in words]), Content_Type="text/event-stream")

    return answer


def test_chat_prints_the_answer_as_it_comes(run: Callable[..., Result], serve: Callable[[Answer], str]) -> None:
    seen: list[Any] = []
    url = serve(echo(seen))
    result = run("chat", "--url", url, "--key", KEY, "--system", "be kind", "--priority", "low", "grüße [b]dich[/b]")
    assert (result.exit_code, result.stdout) == (0, "grüße-[b]dich[/b]-\n")
    assert seen == [
        {
            "model": "tiny",
            "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "grüße [b]dich[/b]"}],
            "stream": True,
            "priority": "low",
        }
    ]
    assert run("chat", "--url", url, "--key", KEY, "--model", "other", "x").exit_code == 0
    assert seen[-1]["model"] == "other"


def test_an_answer_is_bounded_where_that_is_asked_for(
    run: Callable[..., Result], serve: Callable[[Answer], str]
) -> None:
    asked: list[dict[str, Any] | None] = []

    def answer(request: BaseHTTPRequestHandler, body: dict[str, Any] | None) -> None:
        asked.append(body)
        reply(request, 200, sse("yes"))

    url = serve(answer)
    for more in ((), ("--max-tokens", "7")):
        assert run("chat", "--url", url, "--key", KEY, "--model", "m", "hello", *more).exit_code == 0
    assert [(body or {}).get("max_tokens") for body in asked] == [None, 7]


def test_a_conversation_remembers_its_turns(run: Callable[..., Result], serve: Callable[[Answer], str]) -> None:
    seen: list[Any] = []
    result = run("chat", "--url", serve(echo(seen)), "--key", KEY, text="one two\n\nthree\n")
    assert result.exit_code == 0
    assert "one-two-" in result.stdout
    assert [message["content"] for message in seen[-1]["messages"]] == ["one two", "one-two-", "three"]


def test_the_key_of_a_running_instance_is_found(
    run: Callable[..., Result], serve: Callable[[Answer], str], tmp_path: Path
) -> None:
    state = InstanceState("one", tmp_path)
    state.create()
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    url = serve(echo([]))
    state.write(Instance("one", "m", "/r", "127.0.0.1", 1, url=url, api_key_file=str(key_file)))
    assert run("chat", "--instance", "one", "hello").stdout == "hello-\n"
    key_file.unlink()
    gone = run("chat", "--instance", "one", "hello")
    assert gone.exit_code == 2
    assert "--key" in gone.stderr


@pytest.mark.parametrize(
    ("status", "body", "headers", "reported"),
    [
        (
            429,
            b'{"error": {"message": "the line is full"}}',
            {"Retry_After": "3"},
            "the line is full; try again in 3 s",
        ),
        (400, b'{"error": {"message": "too long"}}', {}, "400: too long"),
        (502, b"<html>bad</html>", {}, "502: Bad Gateway"),
        (200, sse("half", done=False), {}, "the answer broke off"),
        (200, b'data: {"error": {"message": "engine died"}}\n\n', {}, "engine died"),
    ],
)
def test_chat_says_in_words_what_went_wrong(
    run: Callable[..., Result],
    serve: Callable[[Answer], str],
    status: int,
    body: bytes,
    headers: dict[str, str],
    reported: str,
) -> None:
    result = run(
        "chat", "--url", serve(lambda request, _: reply(request, status, body, **headers)), "--model", "m", "x"
    )
    assert result.exit_code in (1, 2)
    assert result.stderr.strip() == f"error: {reported}" or result.stderr.strip().endswith(reported)
    assert "Traceback" not in result.output


def test_chat_with_a_wrong_key_or_no_server_says_what_to_do(
    run: Callable[..., Result], serve: Callable[[Answer], str]
) -> None:
    refused = run("chat", "--url", serve(echo([])), "--key", "wrong", "x")
    assert (refused.exit_code, "--key" in refused.stderr) == (1, True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nobody = run("chat", "--url", f"http://127.0.0.1:{port}", "x")
    assert nobody.exit_code == 1
    assert re.search("nothing answers at .*serve-app status", nobody.stderr)
    assert run("chat", "--url", "nonsense", "x").exit_code == 2


def test_an_exchange_that_failed_is_not_part_of_the_conversation(
    run: Callable[..., Result], serve: Callable[[Answer], str]
) -> None:
    seen: list[Any] = []

    def answer(request: BaseHTTPRequestHandler, body: dict[str, Any] | None) -> None:
        seen.append(body)
        if len(seen) == 1:
            reply(request, 503, b'{"error": {"message": "no replica"}}')
        else:
            reply(request, 200, sse("fine"))

    result = run("chat", "--url", serve(answer), "--model", "m", text="first\nsecond\n")
    assert result.exit_code == 0
    assert "no replica" in result.stdout
    assert [message["content"] for message in seen[1]["messages"]] == ["second"]


def test_events_join_lines_and_skip_comments() -> None:
    lines = [
        ": ping",
        'data: {"a":',
        "data: 1}",
        "",
        "event: x",
        'data:{"b": 2}',
        "",
        "data: [DONE]",
        "",
        "data: never",
        "",
    ]
    assert list(chat.events(lines)) == [{"a": 1}, {"b": 2}]
    with pytest.raises(Unavailable, match="broke off"):
        list(chat.events(lines[:4]))


def test_a_users_proxy_and_netrc_are_left_aside_on_this_machine_only() -> None:
    assert not session(Endpoint("http://127.0.0.1:8000", KEY)).trust_env
    assert session(Endpoint("https://models.example", KEY)).trust_env


def test_an_instance_with_tls_is_known_by_its_certificate_file_alone(tmp_path: Path) -> None:
    """Its name is another, nobody has signed it, and the key is sent to no other server."""
    ours = self_signed(tmp_path / "ours")
    other = self_signed(tmp_path / "other")
    asked: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing into the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours.certificate, ours.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"https://127.0.0.1:{server.server_port}"
    try:
        for certificate, answers in ((ours.certificate, True), (other.certificate, False), (None, False)):
            endpoint = Endpoint(url, KEY, None if certificate is None else str(certificate))
            with session(endpoint) as http, contextlib.ExitStack() as expected:
                if not answers:
                    expected.enter_context(pytest.raises(ConfigError))
                assert request(http, endpoint, "GET", "/ready").status_code == 200
        assert asked == [f"Bearer {KEY}"]
    finally:
        server.shutdown()
        server.server_close()


def test_a_line_that_begins_with_a_slash_is_a_command_and_goes_to_no_model(
    run: Callable[..., Result], serve: Callable[[Answer], str]
) -> None:
    seen: list[Any] = []
    lines = ["/help", "one", "/model", "/model other", "two", "/clear", "//three", "/hlep me", "/quit", "four"]
    result = run("chat", "--url", serve(echo(seen)), "--key", KEY, "--system", "be kind", text="\n".join(lines))
    assert result.exit_code == 0
    asked = [(body["model"], [message["content"] for message in body["messages"]]) for body in seen]
    assert asked == [
        ("tiny", ["be kind", "one"]),
        ("other", ["be kind", "one", "one-", "two"]),
        ("other", ["be kind", "/three"]),
    ]
    for command in chat.COMMANDS:
        assert command in result.stdout, "/help names it"
    assert "tiny\n" in result.stdout
    assert "there is no /hlep me; /help shows what there is" in result.stdout
