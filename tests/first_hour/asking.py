"""A newcomer's requests over HTTP: plain ones, a stream, and streams without pause while something changes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import requests

from tests.first_hour.walk import StepFailedError

QUESTION = [{"role": "user", "content": "Hello!"}]
SILENCE_S = 120.0  # between two tokens, while an engine starts on the same cores
END = "data: [DONE]"


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream that came whole: its tokens, the seconds to the first and the longest between two."""

    tokens: int
    first_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    key: str

    def with_key(self, key: str) -> Endpoint:
        return Endpoint(self.url, key)

    def get(self, path: str) -> requests.Response:
        return requests.get(f"{self.url}{path}", headers=self._headers(), timeout=SILENCE_S)

    def chat(self, model: str, **more: Any) -> requests.Response:
        """A short answer, not streamed unless asked for."""
        body = {"model": model, "messages": QUESTION, "max_tokens": 16} | more
        return requests.post(
            f"{self.url}/v1/chat/completions",
            json=body,
            headers=self._headers(),
            stream=bool(more.get("stream")),
            timeout=SILENCE_S,
        )

    def stream(self, model: str, tokens: int, on_token: Callable[[], None] = lambda: None) -> Stream:
        """A stream of exactly so many tokens.

        Raises:
            StepFailedError: it is refused or cut.
        """
        began = last = time.monotonic()
        first_s = 0.0
        gap_s = 0.0
        count = 0
        made = 0
        text = ""
        more = {"max_tokens": tokens, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        with self.chat(model, **more) as answer:
            require(answer, 200)
            for line in answer.iter_lines(decode_unicode=True):
                text = line or text
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise StepFailedError(f"the stream ended with {line}")
                made = (event.get("usage") or {}).get("completion_tokens", made)
                if not any(choice["delta"].get("content") for choice in event["choices"]):
                    continue
                first_s = first_s or now - began
                gap_s, last, count = max(gap_s, now - last if count else 0.0), now, count + 1
                on_token()
        if text != END or made != tokens or not count:
            raise StepFailedError(f"{made} of {tokens} tokens in {count} pieces; last: {text[-300:]!r}")
        return Stream(tokens, first_s, gap_s)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


class Streaming:
    """Streams one after the other, as long as the block lasts; it begins with the first token of the first.

    Raises:
        StepFailedError: at its end: one was cut.
    """

    def __init__(self, endpoint: Endpoint, model: str, tokens: int) -> None:
        self.streams: list[Stream] = []
        self._endpoint = endpoint
        self._model = model
        self._tokens = tokens
        self._over = threading.Event()
        self._flows = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Streaming:
        self._thread.start()
        self._flows.wait(SILENCE_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if kind is None and self._failure is not None:
            raise StepFailedError(f"a stream broke: {self._failure}")

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self.streams.append(self._endpoint.stream(self._model, self._tokens, self._flows.set))
        except (requests.RequestException, StepFailedError) as error:
            self._failure = error
            self._flows.set()


def require(answer: requests.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """The answer's JSON (of a stream nothing).

    Raises:
        StepFailedError: another status, or another code of an error.
    """
    request = answer.request
    if answer.status_code != status:
        reported = f"{answer.status_code}, not {status}: {answer.text[:500]}"
        raise StepFailedError(f"{request.method} {request.url}: {reported}")
    if "json" not in answer.headers.get("content-type", ""):
        return {}
    body: dict[str, Any] = answer.json()
    if code is not None and body["error"]["code"] != code:
        raise StepFailedError(f"{request.method} {request.url}: {body['error']['code']}, not {code}")
    return body
