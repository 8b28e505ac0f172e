"""`serve-app chat`: a conversation with a running instance over its OpenAI endpoint.

A line that begins with `/` is one of `COMMANDS` and goes to no model.

Invariant: the output is the text that the server streamed, in order; an error ends the answer and is shown as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import requests
from rich.console import Console

from serve_app.cli.endpoint import Endpoint, error_message, fetch, request, session
from serve_app.cli.layout import say
from serve_app.errors import BadRequest, ServeAppError, Unavailable

DONE = "[DONE]"
COMMANDS = {  # of a conversation
    "/help": "these commands",
    "/model [NAME]": "which model answers; with NAME that one from now on",
    "/clear": "forget the conversation; the system message stays",
    "/quit": "leave, as Ctrl-D does; Ctrl-C ends an answer",
    "//...": "a message that begins with /",
}


def first_model(endpoint: Endpoint) -> str:
    served = fetch(endpoint, "GET", "/v1/models")["data"]
    if not served:
        raise BadRequest(f"{endpoint.url} serves no model", param="model")
    return str(served[0]["id"])


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON data of a server-sent event stream, up to `[DONE]`.

    Raises:
        Unavailable: the stream carried an error, or ended without `[DONE]`.
    """
    data: list[str] = []
    for line in lines:
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


def answer(endpoint: Endpoint, body: dict[str, Any]) -> Iterator[str]:
    """The pieces of text of a streamed chat completion.

    Raises:
        ServeAppError: refused, unreachable or broken off, with a message for the user.
    """
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


@dataclass(slots=True)
class Conversation:
    """The messages so far; each `send` prints the answer as it arrives and stores it."""

    endpoint: Endpoint
    model: str
    console: Console
    priority: str | None
    messages: list[dict[str, str]]
    max_tokens: int | None = None  # of an answer; None: as the server bounds it

    def send(self, text: str) -> None:
        """Run one exchange. A failed exchange is removed from the messages, so that it can be repeated."""
        asked = [*self.messages, {"role": "user", "content": text}]
        body: dict[str, Any] = {"model": self.model, "messages": asked, "stream": True}
        if self.priority is not None:
            body["priority"] = self.priority
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        pieces = []
        try:
            for piece in answer(self.endpoint, body):
                pieces.append(piece)
                self.console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        finally:
            if pieces:
                self.console.print()
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def interact(self) -> None:
        """Read messages and `COMMANDS`, a line each, until the end of input. Ctrl-C ends the present answer; at the
        prompt it ends the conversation."""
        if self.console.is_terminal:
            self._tell("/help shows what there is besides messages")
        while True:
            try:
                text = self.console.input("[bold]you>[/bold] ").strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return
            if text == "/quit":
                return
            try:
                if text.startswith("/") and not text.startswith("//"):
                    self._obey(*text.split(maxsplit=1))
                elif text:
                    self.send(text.removeprefix("/"))
            except KeyboardInterrupt:
                self.console.print("(interrupted)")
            except ServeAppError as error:
                self.console.print(f"error: {error.message}", style="red", markup=False, highlight=False)

    def _obey(self, command: str, argument: str = "") -> None:
        match command, argument:
            case "/model", "":
                self._tell(self.model)
            case "/model", name:
                self.model = name
            case "/clear", "":
                self.messages = [message for message in self.messages if message["role"] == "system"]
            case "/help", "":
                width = max(map(len, COMMANDS))
                for name, meaning in COMMANDS.items():
                    self._tell(f"{name:{width}}  {meaning}")
            case _:
                self._tell(f"there is no {command}{' ' + argument if argument else ''}; /help shows what there is")

    def _tell(self, line: str) -> None:
        say(self.console, line, "dim")
