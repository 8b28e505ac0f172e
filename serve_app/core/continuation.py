"""What a stream has produced, in the terms in which another engine can continue it, and whether one can. Pure.

The router records, of each message of an engine, the token groups and the number of events that it brings; the next
engine replays the groups and drops as many events (docs/decisions/routing-and-continuity.md).

Invariant: after each message, the record is that of exactly the bytes the client has or will get; a run that continues
others adds to their record, so the sum over any number of runs is that of one undisturbed run.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.types import Operation

_WORD = "I"  # 4 bytes: token ids and choices are far below 2**32
GROUP_WORDS = 2  # of a group besides its tokens: its length and its choice; so 12 bytes a token sent by itself
MAX_WORDS = 2**22  # 16 MiB of one stream, as much as may wait unread; 1.4 million tokens
OUTPUT_LOGPROBS = "message.output_text.logprobs"  # what a Responses request includes to get them


class NotContinued(enum.StrEnum):
    """Why a request was not continued, and its client got an error; a label of the metrics."""

    ENGINE = "engine"  # the engine, or every one of the model, cannot continue what another has begun
    REQUEST = "request"  # what it asks for can be finished only by the engine that began it
    TOO_LONG = "too_long"  # it has produced more than is recorded of one stream
    LOSSES = "losses"  # it has lost as many engines as one request may, or reached none for the longest wait
    QUEUE = "queue"  # no replica took it within the longest wait
    REFUSED = "refused"  # the engine that was to continue it could not do so exactly


class Produced:
    """What the runs of one stream have produced so far.

    Attributes:
        tokens: of all choices. events: that the serving object has yielded.
    """

    __slots__ = ("_words", "events", "is_whole", "tokens")

    def __init__(self) -> None:
        self.tokens = self.events = 0
        self.is_whole = True  # False: it was too long, and its groups are no longer recorded
        self._words = array(_WORD)  # of each group: its length, then the choice and the tokens

    def add(self, groups: Sequence[Sequence[int]], events: int) -> int:
        """Record a message; returns its tokens. O(tokens)."""
        self.events += events
        if not groups:
            return 0
        more = 0
        words = self._words
        for group in groups:
            more += len(group) - 1
            if self.is_whole:
                words.append(len(group))
                words.extend(group)
        self.tokens += more
        if len(words) > MAX_WORDS:
            self.is_whole = False
            self._words = array(_WORD)
        return more

    @property
    def groups(self) -> list[list[int]]:
        """The recorded groups, each `[choice, token, ...]`, in order. O(tokens)."""
        words = self._words
        groups = list[list[int]]()
        start = 0
        while start < len(words):
            end = start + 1 + words[start]
            groups.append(words[start + 1 : end].tolist())
            start = end
        return groups

    @property
    def recorded_bytes(self) -> int:
        """The memory of the record."""
        return len(self._words) * self._words.itemsize


def why_not_continued(
    operation: Operation,
    body: Mapping[str, Any],
    *,
    engine_continues: bool = True,
    is_same_model: bool = True,
    is_recorded: bool = True,
) -> NotContinued | None:
    """Why a request cannot be continued exactly by another engine than the one that began it; None: it can, by all that
    the caller knows. A router and an engine ask this, each with what it knows.

    Args:
        engine_continues: whether the engine can continue what others have begun; in a router, the engines of the model.
        is_same_model: whether the engine has the model and the settings of the one that began it.
        is_recorded: whether all that it has produced is recorded.
    """
    if not (engine_continues and is_same_model):
        return NotContinued.ENGINE
    include = body.get("include")
    repeats_logprobs = operation is Operation.RESPONSES and type(include) is list and OUTPUT_LOGPROBS in include
    # Only the first engine has the values that the last event repeats, the beams, or the chunks of audio.
    if operation.hears or repeats_logprobs or body.get("use_beam_search"):
        return NotContinued.REQUEST
    return None if is_recorded else NotContinued.TOO_LONG


def is_preemptible(operation: Operation, body: Mapping[str, Any]) -> bool:
    """Whether such a request can be stopped while it runs and continued without loss, if the engines continue answers.

    Of an answer that is no stream, an engine can tell the tokens of one choice, and no log probabilities."""
    if not operation.generates or why_not_continued(operation, body) is not None:
        return False
    logprobs = body.get("logprobs")
    has_logprobs = logprobs is not None and logprobs is not False  # 0: of the tokens of a completion alone
    if body.get("prompt_logprobs") is not None:
        return False
    if body.get("echo") and (has_logprobs or operation is Operation.CHAT):
        return False  # vLLM then gives log probabilities of the prompt
    return bool(body.get("stream")) or (body.get("n") in (None, 1) and not has_logprobs)
