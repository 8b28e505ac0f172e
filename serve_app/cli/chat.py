"""`serve-app chat`: a conversation with a running instance over its OpenAI endpoint.

Invariant: the output is the text that the server streamed, in order; an error ends the answer and is shown as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
from rich.console import Console

from serve_app.errors import BadRequest, ServeAppError, Unauthorized, Unavailable

CONNECT_S = 5.0  # the instance is on this machine or nearby
SILENCE_S = 300.0  # between two pieces: a long prompt in a full queue waits a minute, then prefills
DONE = "[DONE]"
LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The URL of an endpoint and the key for it."""

    url: str
    key: str | None


def session(endpoint: Endpoint) -> requests.Session:
    """A session that sends the key. For this machine it ignores the user's proxy and .netrc: the proxy does not reach
    this loopback, and .netrc would replace the key."""
    made = requests.Session()
    made.trust_env = urlsplit(endpoint.url).hostname not in LOCAL_NAMES
    if endpoint.key:
        made.headers["Authorization"] = f"Bearer {endpoint.key}"
    return made


def request(http: requests.Session, endpoint: Endpoint, method: str, path: str, **options: Any) -> requests.Response:
    url = endpoint.url.rstrip("/") + path
    try:
        response = http.request(method, url, timeout=(CONNECT_S, SILENCE_S), allow_redirects=False, **options)
    except requests.ConnectionError:
        raise Unavailable(f"nothing answers at {endpoint.url}; is the instance running? (serve-app status)") from None
    except requests.Timeout:
        raise Unavailable(f"no answer from {endpoint.url} within {SILENCE_S:.0f} s") from None
    except requests.RequestException as error:
        raise BadRequest(f"{url}: {error}", param="url") from None
    if response.status_code != 200:
        raise _refusal(response)
    return response


def _refusal(response: requests.Response) -> ServeAppError:
    """The server's error as text: its own message if there is one, when to retry, the remedy for a 401."""
    message = error_message(response.text) or response.reason or "no reason given"
    if response.status_code == 401:
        return Unauthorized(f"the key was refused ({message}); give the right one with --key")
    wait = response.headers.get("Retry-After")
    again = f"; try again in {wait} s" if wait else ""
    kind = Unavailable if response.status_code in (429, 502, 503) else BadRequest
    return kind(f"{response.status_code}: {message}{again}")


def error_message(text: str) -> str | None:
    """The message of an OpenAI error body; None if `text` is no such body."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, str) else None


def models(endpoint: Endpoint) -> list[str]:
    """Names of the models served."""
    with session(endpoint) as http:
        return [model["id"] for model in request(http, endpoint, "GET", "/v1/models").json()["data"]]


def events(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The JSON data of a server-sent event stream, up to `[DONE]`.

    Raises:
        Unavailable: the stream carried an error, or ended without `[DONE]`.
    """
    data: list[str] = []
    for raw in lines:
        line = raw.decode() if isinstance(raw, bytes) else raw
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            text, data = "\n".join(data), []
            if text == DONE:
                return
            message = error_message(text)
            if message is not None:
                raise Unavailable(message)
            yield json.loads(text)
    raise Unavailable("the answer broke off")


def answer(
    endpoint: Endpoint, model: str, messages: Sequence[dict[str, str]], priority: str | None = None
) -> Iterator[str]:
    """The pieces of text of a streamed chat completion.

    Raises:
        ServeAppError: refused, unreachable or broken off, with a message for the user.
    """
    body: dict[str, Any] = {"model": model, "messages": list(messages), "stream": True}
    if priority is not None:
        body["priority"] = priority
    with session(endpoint) as http:
        response = request(http, endpoint, "POST", "/v1/chat/completions", json=body, stream=True)
        response.encoding = "utf-8"
        try:
            for event in events(response.iter_lines(decode_unicode=True)):
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    # reasoning models send their reasoning in a separate field
                    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
                    if text:
                        yield text
        except requests.RequestException as error:
            raise Unavailable(f"the connection broke: {type(error).__name__}") from None


class Conversation:
    """The messages so far; each `send` prints the answer as it arrives and stores it."""

    def __init__(
        self, endpoint: Endpoint, model: str, console: Console, *, system: str | None, priority: str | None
    ) -> None:
        self._endpoint = endpoint
        self._model = model
        self._console = console
        self._priority = priority
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def send(self, text: str) -> str:
        """Run one exchange. A failed exchange is removed from the messages, so that it can be repeated."""
        asked = [*self._messages, {"role": "user", "content": text}]
        pieces = []
        try:
            for piece in answer(self._endpoint, self._model, asked, self._priority):
                pieces.append(piece)
                self._console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        finally:
            if pieces:
                self._console.print()
        reply = "".join(pieces)
        self._messages = [*asked, {"role": "assistant", "content": reply}]
        return reply


def interactive(conversation: Conversation, console: Console) -> None:
    """Read lines until the end of input. Ctrl-C ends the present answer; at the prompt it ends the conversation."""
    while True:
        try:
            text = console.input("[bold]you>[/bold] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not text:
            continue
        try:
            conversation.send(text)
        except KeyboardInterrupt:
            console.print("(interrupted)")
        except ServeAppError as error:
            console.print(f"error: {error.message}", style="red", markup=False, highlight=False)
