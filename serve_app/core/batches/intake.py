"""What an entry of a Redis stream asks for, and what becomes of it after each answer.

An entry is a row with fields of its own: `id`, `endpoint`, `body`, `reply_to`. It ends with one reply: the answer of
its request, or the error for which it became a dead letter.

Invariant: no answer that says "later" counts as a failed delivery, and every other failure does: an entry is run a
bounded number of times, and none is given up because the models were busy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

from serve_app.core.batches.records import RowError
from serve_app.core.batches.rows import ENDPOINTS, BadRow, model_of, read_object
from serve_app.errors import AnswerNotKept, RequestFailed, RunLost

DEFAULT_ENDPOINT = "/v1/chat/completions"
MAX_ID_CHARS = 240  # of the 255 of an Idempotency-Key: a lost run is run again under the id and a suffix
DEFAULT_RETRY_AFTER_S = 1.0  # of an answer that says "later" and not when
MIN_RETRY_AFTER_S = 0.01  # an answer that says 0 must not make a loop of requests
MAX_RETRY_AFTER_S = 300.0  # a limit of a day is asked again every five minutes: an operator may have raised it
LATER = frozenset({429, 503, 529})  # nothing has run; the last is Anthropic's for the first two
KEY_REFUSED = 401  # the key of the stream is revoked or expired: the fault of no entry
DEFAULT_WAITS_S = {KEY_REFUSED: 30.0}  # somebody has to change the key or the settings
TRANSIENT = frozenset({408, 425})  # refusals which the next attempt need not get
# Codes of answers after which its Idempotency-Key answers nothing else: the next attempt needs another key.
KEY_USED_UP = frozenset({RunLost.code, AnswerNotKept.code})
_VISIBLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")  # what a header takes
DEAD_FIELDS = ("reason", "deliveries", "stream", "entry")  # what a dead letter has beside the fields of its entry


class EntryVerdict(StrEnum):
    """What becomes of an entry after an answer."""

    ANSWERED = "answered"
    LATER = "later"  # it waits, and is run again; not counted
    FAILED = "failed"  # it is run again as the next delivery, or is a dead letter after the last one
    REFUSED = "refused"  # a dead letter: it would be refused again


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """An entry as its consumer has it.

    Args:
        entry_id: Redis's, in its stream.
        deliveries: how often it was delivered, this time counted.
    """

    stream: str
    entry_id: str
    fields: Mapping[bytes, bytes]
    deliveries: int = 1

    @property
    def request_id(self) -> str:
        """The key under which it runs once, and the `id` of its reply."""
        given = self._text(b"id")
        return given if given is not None and _VISIBLE.fullmatch(given) else f"{self.stream}-{self.entry_id}"

    def reply_stream(self, default: str, prefix: str | None, forbidden: Collection[str] = ()) -> str:
        """Where its reply goes: to `reply_to` if that begins with `prefix`, and to no stream of `forbidden`."""
        wanted = self._text(b"reply_to")
        if wanted is None or prefix is None or not wanted.startswith(prefix) or wanted in forbidden:
            return default
        return wanted

    def dead_letter(self, reason: str) -> dict[bytes, bytes]:
        """Its fields and why it died; a field of its own that is called like one of ours begins with `entry.` there."""
        ours = dict(zip(DEAD_FIELDS, (reason, str(self.deliveries), self.stream, self.entry_id), strict=True))
        names = {name.encode() for name in DEAD_FIELDS}
        fields = {(b"entry." + name if name in names else name): value for name, value in self.fields.items()}
        return fields | {name.encode(): text.encode() for name, text in ours.items()}

    def _text(self, name: bytes) -> str | None:
        """A field as text; None: it is missing or no text."""
        try:
            return self.fields[name].decode() if name in self.fields else None
        except UnicodeDecodeError:
            return None


@dataclass(frozen=True, slots=True)
class EntryRequest:
    """The request of an entry."""

    path: str
    model: str
    body: bytes


def request_of(entry: StreamEntry) -> EntryRequest:
    """The request of an entry.

    Raises:
        BadRow: it has none that could be run; every delivery of it would fail in the same way.
    """
    given = entry.fields.get(b"id")
    if given is not None and entry.request_id.encode() != given:
        _refuse(f"The id must be 1 to {MAX_ID_CHARS} visible ASCII characters.", "id")
    path = entry.fields.get(b"endpoint", DEFAULT_ENDPOINT.encode()).decode(errors="replace")
    if path not in ENDPOINTS:
        _refuse(f"The endpoint must be one of {', '.join(ENDPOINTS)}.", "endpoint")
    if b"body" not in entry.fields:
        _refuse("The entry has no field 'body'.", "body")
    text = entry.fields[b"body"]
    return EntryRequest(path, model_of(read_object(text, "body")), text)


def verdict(status: int, code: str | None = None) -> EntryVerdict:
    """What an answer means for its entry.

    Args:
        code: of the error in the answer.
    """
    if status < 400:
        return EntryVerdict.ANSWERED
    if status in LATER or status == KEY_REFUSED:
        return EntryVerdict.LATER
    is_failure = status >= 500 or status in TRANSIENT or code in KEY_USED_UP
    if code == RequestFailed.code:  # every delivery would end so
        is_failure = False
    return EntryVerdict.FAILED if is_failure else EntryVerdict.REFUSED


def idempotency_key(request_id: str, keys_used_up: int) -> str:
    """The key of the next attempt: every consumer comes to the same one, and joins a run that goes on."""
    return f"{request_id}~{keys_used_up}" if keys_used_up else request_id


def wait_s(status: int, retry_after_s: float | None) -> float:
    """How long the entries of a stream and a model wait after an answer that says "later"."""
    wait = DEFAULT_WAITS_S.get(status, DEFAULT_RETRY_AFTER_S) if retry_after_s is None else retry_after_s
    return min(max(wait, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def entries_to_read(may_start: Collection[int], held_back: int, room: int) -> int:
    """How many entries to take from a stream.

    No more than can start at once if they are all of the model with the most free places, and those that wait here
    already come first. One if none waits here: which model it needs is known only once it has been read, and by it the
    others who send rows of that model know that this stream has some.

    Args:
        may_start: of each model that is known, how many rows may be sent now.
        held_back: entries here that do not run.
        room: for entries here, at most.
    """
    return min(max(max(may_start, default=0) - held_back, 0 if held_back else 1), room)


def error_body(message: str, *, code: str, param: str | None = None) -> bytes:
    """The body of the reply to an entry that was not run, in OpenAI's format."""
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return json.dumps({"error": error}).encode()


def _refuse(message: str, param: str) -> NoReturn:
    raise BadRow(RowError("invalid_value", message, param=param))
