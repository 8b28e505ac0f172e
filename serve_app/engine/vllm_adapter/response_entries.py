"""Log probabilities of answers of the Responses API, made and encoded in slices.

vLLM makes those of a whole answer in one turn of the event loop, and each model of OpenAI's SDK takes long to encode:
1,900 tokens with 20 entries each took 220 ms to make, and 140 ms to encode, in each of a stream's last three events.

Invariant: the JSON is that of vLLM's models.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel

from serve_app.engine.vllm_adapter.log_probabilities import Entries, keep, tokens_of_slice
from serve_app.engine.vllm_adapter.private_names import RESPONSE_NAMES, RESPONSES_SERVING, missing
from serve_app.engine.vllm_adapter.wrapped import wrap

logger = logging.getLogger("ray.serve")

Make = Callable[[slice], Sequence[BaseModel]]
MakeEntries = Callable[[Iterable[Entries]], Awaitable[None]]
MadeOfResponse = Callable[..., list[BaseModel]]


class ResponseEntries:
    """The log probabilities of a text, empty until they are made.

    Args:
        make: those of the tokens in a slice.
        each: entries of a token.
    """

    def __init__(self, make: Make, tokens: int, each: int) -> None:
        self._make = make
        self._tokens = tokens
        self._each = each
        self._encoded: list[bytes] = []

    def slices(self) -> Iterator[None]:
        """Makes the next entries at each step."""
        step = tokens_of_slice(self._each)
        for start in range(0, self._tokens, step):
            made = self._make(slice(start, start + step))
            self._encoded += [one.model_dump_json(by_alias=True).encode() for one in made]
            yield

    @property
    def json(self) -> msgspec.Raw:
        """Those that are made."""
        return msgspec.Raw(b"[" + b",".join(self._encoded) + b"]")


def _is_long(tokens: int, last: Sequence[Any] | None) -> bool:
    """Whether the log probabilities of so many tokens, with as many entries each as the last one, are above a slice."""
    return tokens > tokens_of_slice(len(last or ()))


def install() -> None:
    """Patch vLLM's front end in this process."""
    if lacking := missing(RESPONSE_NAMES):
        logger.warning(
            "vLLM has changed and lacks %s; log probabilities of a long response delay others", ", ".join(lacking)
        )
        return
    serving: Any = importlib.import_module(RESPONSES_SERVING).OpenAIServingResponses
    wrap(serving, "_create_response_logprobs", _kept_of_response)


def _kept_of_response(
    make: MadeOfResponse, serving: Any, *, token_ids: Sequence[int], logprobs: Sequence[Any], **given: Any
) -> list[BaseModel]:
    """vLLM's method that makes those of a response: many of a whole answer are left to `slices`."""

    def made_of(part: slice) -> list[BaseModel]:
        return make(serving, token_ids=token_ids[part], logprobs=logprobs[part], **given)

    tokens = len(token_ids)
    if tokens and _is_long(tokens, logprobs[-1]) and keep(ResponseEntries(made_of, tokens, len(logprobs[-1]))):
        return []
    return made_of(slice(None))


def encoded(answer: BaseModel, kept: Sequence[Entries]) -> bytes:
    """A whole answer, with the log probabilities that were kept out of it and are made now."""
    entries = next((one for one in kept if isinstance(one, ResponseEntries)), None)
    if entries is None:
        return answer.model_dump_json(by_alias=True).encode()
    body = answer.model_dump(mode="json", by_alias=True)
    for text in _contents({"response": body}, _of_dict):
        if text.get("logprobs") == []:
            text["logprobs"] = entries.json
    return msgspec.json.encode(body)


async def event_body(event: BaseModel, make_entries: MakeEntries) -> dict[str, Any]:
    """An event of a stream, for `msgspec.json.encode`. `make_entries` runs their slices."""
    long = dict[int, list[Any]]()
    texts = list(_contents(event, _of_model))
    for number, text in enumerate(texts):
        logprobs = getattr(text, "logprobs", None)
        if logprobs and _is_long(len(logprobs), logprobs[-1].top_logprobs):
            long[number] = logprobs
            text.logprobs = []
    try:
        body = event.model_dump(mode="json", by_alias=True)
    finally:
        for number, logprobs in long.items():
            texts[number].logprobs = logprobs
    for number, text in enumerate(_contents(body, _of_dict)):
        if number in long:
            logprobs = long[number]
            entries = ResponseEntries(logprobs.__getitem__, len(logprobs), len(logprobs[-1].top_logprobs or ()))
            await make_entries([entries])
            text["logprobs"] = entries.json
    return body


def _contents(event: Any, get: Callable[[Any, str], Any]) -> Iterator[Any]:
    """The contents of an event of a stream, or of its JSON."""
    if (part := get(event, "part")) is not None:
        yield part
    for item in (get(event, "item"), *(get(get(event, "response"), "output") or ())):
        yield from get(item, "content") or ()


def _of_model(model: Any, name: str) -> Any:
    return getattr(model, name, None)


def _of_dict(value: Any, name: str) -> Any:
    return None if value is None else value.get(name)
