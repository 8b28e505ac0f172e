"""What a client makes of the bytes of an answer, and how it differs from the undisturbed one. Pure.

Invariant: two answers are equal if and only if texts, reasons of their end and counted tokens are. Ids, times and how
tokens are grouped into events are the server's choice; that they are one answer's is checked in `read`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.questions import Api

SHOWN_CHARS = 200


class Malformed(Exception):
    """The bytes are no whole answer; `code`: of the error in it, if it ends with one."""

    def __init__(self, why: str, code: str = "") -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: text and reason of its end by choice, and tokens of the prompt and the output."""

    texts: tuple[str, ...]
    ends: tuple[str, ...]
    usage: tuple[int, int]


def read(api: Api, data: bytes, *, stream: bool) -> Answer:
    """The answer in a body with status 200.

    Raises:
        Malformed: it breaks off, ends with an error, or is not the answer of one run.
    """
    text = data.decode(errors="replace")
    try:
        if not stream:
            document = json.loads(text)
            return _response(document) if api is Api.RESPONSES else _document(document)
        return _response_stream(text) if api is Api.RESPONSES else _chunks(text)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Malformed(f"{error!r} in ...{text[-SHOWN_CHARS:]!r}") from error


def duplicated(expected: Answer, got: Answer) -> str:
    """The text that the answer has twice: what is left of it when the undisturbed one is taken out."""
    found = ""
    for wanted, had in zip(expected.texts, got.texts, strict=False):
        more = len(had) - len(wanted)
        at = next((i for i, pair in enumerate(zip(wanted, had, strict=False)) if pair[0] != pair[1]), len(wanted))
        for start in range(at, -1, -1):  # what is repeated begins where the two part, or before
            if more > 0 and had[:start] + had[start + more :] == wanted:
                found += had[start : start + more]
                break
    return found


def _events(text: str) -> list[Any]:
    """The JSON of each event; what is left is [DONE], or broken off.

    Raises:
        Malformed: an error event is among them.
    """
    found = []
    *events, rest = text.split("\n\n")
    if rest:
        raise Malformed(f"breaks off in an event: {rest[:SHOWN_CHARS]!r}")
    for event in events:
        data = next((line[6:] for line in event.split("\n") if line.startswith("data: ")), None)
        if data is None:
            continue  # a comment
        value = data if data == "[DONE]" else json.loads(data)
        if isinstance(value, dict) and isinstance(error := value.get("error"), dict):
            raise Malformed(f"ends with {data[:SHOWN_CHARS]}", str(error.get("code")))
        found.append(value)
    return found


def _chunks(text: str) -> Answer:
    """A stream of chat or completions."""
    events = _events(text)
    if not events or events.pop() != "[DONE]":
        raise Malformed(f"breaks off after {text[-SHOWN_CHARS:]!r}")
    if len({(one["id"], one["created"]) for one in events}) != 1:
        raise Malformed("chunks of several answers")
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    usage: list[tuple[int, int]] = []
    for event in events:
        for choice in event["choices"]:
            number = choice["index"]
            delta = choice.get("delta", choice)
            if number in ends:
                raise Malformed(f"choice {number} goes on after its end")
            if "role" in delta and number in texts:
                raise Malformed(f"choice {number} begins twice")
            texts[number] = texts.get(number, "") + (delta.get("content" if "delta" in choice else "text") or "")
            if choice.get("finish_reason"):
                ends[number] = choice["finish_reason"]
        if event.get("usage") and not event["choices"]:
            usage.append((event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]))
    if len(usage) != 1 or texts.keys() != ends.keys():
        raise Malformed(f"{len(usage)} usages, choices {sorted(texts)}, of which ended {sorted(ends)}")
    order = sorted(texts)
    return Answer(tuple(texts[one] for one in order), tuple(ends[one] for one in order), usage[0])


def _document(document: Any) -> Answer:
    choices = sorted(document["choices"], key=lambda choice: choice["index"])
    texts = tuple(one["message"]["content"] if "message" in one else one["text"] for one in choices)
    usage = document["usage"]
    return Answer(
        texts, tuple(one["finish_reason"] for one in choices), (usage["prompt_tokens"], usage["completion_tokens"])
    )


def _response(response: Any) -> Answer:
    text = "".join(part["text"] for item in response["output"] for part in item.get("content") or ())
    usage = response["usage"]
    return Answer((text,), (response["status"],), (usage["input_tokens"], usage["output_tokens"]))


def _response_stream(text: str) -> Answer:
    events = _events(text)
    if [event["sequence_number"] for event in events] != list(range(len(events))):
        raise Malformed("its sequence numbers are not gapless")
    last = events[-1] if events else {}
    if last.get("type") not in ("response.completed", "response.incomplete"):
        raise Malformed(f"breaks off after {text[-SHOWN_CHARS:]!r}")
    answer = _response(last["response"])
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    if (deltas,) != answer.texts:
        raise Malformed(f"its deltas are {deltas[-SHOWN_CHARS:]!r}, and its text is {answer.texts[0][-SHOWN_CHARS:]!r}")
    return answer
