"""Greedy completions of either server as token ids, one request at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.arms import Arm, BenchmarkError, get, session
from benchmarks.gpu_check.answers import Answer

LIKELIEST = 2  # tokens of which the log probabilities are asked for: their distance is the margin
ERROR_CHARS = 500  # of a refusal, in a message


class Client:
    """Asks one server. `timeout_s`: of a wait for bytes, in which an engine may start anew.

    Raises (each method):
        BenchmarkError: refused, or the connection broke.
    """

    def __init__(self, arm: Arm, model: str, timeout_s: float) -> None:
        self._arm = arm
        self._model = model
        self._timeout_s = timeout_s

    def complete(self, prompt: str | Sequence[int], tokens: int, *, margins: bool = False) -> Answer:
        """A whole answer."""
        more = {"logprobs": LIKELIEST} if margins else {}
        with session(self._arm) as http, self._post(http, prompt, tokens, **more) as answer:
            (choice,) = answer.json()["choices"]
        found = (choice.get("logprobs") or {}).get("top_logprobs") or []
        return Answer(
            tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"]), choice["text"], tuple(map(_margin, found))
        )

    def stream(
        self, prompt: str | Sequence[int], tokens: int, on_tokens: Callable[[int], None] = lambda count: None
    ) -> Answer:
        """A streamed answer; `on_tokens` is called with the count of tokens so far."""
        ids: list[int] = []
        asked = list[int]()
        text = ""
        error = ""
        with session(self._arm) as http, self._post(http, prompt, tokens, stream=True) as answer:
            for event in _events(answer):
                if "error" in event:
                    error = str(event["error"].get("code") or event["error"].get("type"))
                for choice in event.get("choices", ()):
                    asked += choice.get("prompt_token_ids") or []
                    ids += choice.get("token_ids") or []
                    text += choice.get("text") or ""
                    on_tokens(len(ids))
        return Answer(tuple(asked), tuple(ids), text, error=error)

    def _post(self, http: requests.Session, prompt: str | Sequence[int], tokens: int, **more: Any) -> requests.Response:
        body = {
            "model": self._model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        url = f"{self._arm.url}/v1/completions"
        try:
            answer = http.post(url, json=body, stream=bool(more.get("stream")), timeout=self._timeout_s)
        except requests.RequestException as error:
            raise BenchmarkError(f"{self._arm.label}: {error}") from error
        if answer.status_code != 200:
            raise BenchmarkError(f"{self._arm.label} answered {answer.status_code}: {answer.text[:ERROR_CHARS]}")
        return answer


def _events(answer: requests.Response) -> Iterator[dict[str, Any]]:
    try:
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
    except requests.RequestException as error:
        raise BenchmarkError(f"the stream broke without an error event: {error}") from error


def _margin(likeliest: dict[str, float]) -> float:
    """Nats between the two likeliest; two that read alike count as one, and as a tie."""
    first, second = (*sorted(likeliest.values(), reverse=True), *likeliest.values())[:2]
    return first - second


def read_json(arm: Arm, path: str) -> dict[str, Any]:
    """Raises BenchmarkError: any status but 200."""
    status, body = get(arm, path)
    if status != 200:
        raise BenchmarkError(f"{arm.label} answered {path} with {status}: {body[:ERROR_CHARS]!r}")
    found: dict[str, Any] = json.loads(body)
    return found


def block_tokens(arm: Arm) -> int:
    """The size of a KV block of vLLM's own server, by its metrics.

    Raises:
        BenchmarkError: they do not say.
    """
    for family in text_string_to_metric_families(get(arm, "/metrics")[1].decode()):
        for sample in family.samples:
            if sample.name.startswith("vllm:cache_config_info") and sample.labels.get("block_size", "").isdigit():
                return int(sample.labels["block_size"])
    raise BenchmarkError(f"{arm.label}: its metrics name no block size")
