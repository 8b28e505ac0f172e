"""Whether a replica takes requests and answers none: by the time to first frame, against its own history, or because
its process stands still. Pure.

Rules
- A first frame takes the longer, the more prompt tokens were sent to the replica and not answered before it. So its
  time counts for each of these tokens, and the slowest such pace fades with each later first frame.
- The replica is silent when requests without a frame have waited, and none has had its first one, for `FACTOR` times as
  long as the slowest pace explains, and for `SILENCE_FLOOR_S`. Not the same ones: clients that give up make it no less
  silent.
- Before `MIN_FRAMES` first frames there is no history, and nothing is called silent.
- In the middle of an answer there may be no frame for minutes: a parser keeps what is no event yet, and an answer that
  is no stream has one at its end. So a replica that has requests and sends nothing for `SILENCE_FLOOR_S` is asked for
  a sign of life, with history or without. Its process stands still if it does not answer within as long.

Invariant: a replica that gives any first frame within `SILENCE_FLOOR_S` is not silent, however many requests wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.core.times import SILENCE_FLOOR_S

FACTOR = 8.0  # times the slowest known pace: the engine may be eight times as busy with requests of other routers
MIN_FRAMES = 16  # fewer have perhaps met no load yet
FADING = 0.99  # of the slowest pace with each first frame: half of it after 70
BASE_TOKENS = 256  # a first frame takes a step and a round trip, however short its prompt


def is_to_be_asked(last_message_at: float, now: float) -> bool:
    """Whether to ask the process of a replica for a sign of life: it has requests, and its last message is so old."""
    return now - last_message_at > SILENCE_FLOOR_S


@dataclass(slots=True)
class FirstFrames:
    """The first frames of one replica, as one router sees them. O(1) per event."""

    frames: int = 0  # so far
    slowest_s: float = 0.0  # per token
    last_at: float = 0.0  # of the last first frame
    waiting_tokens: int = 0
    waiting_since: float = 0.0  # of the requests without a frame; there has been one all the time
    # by number, requests without a frame, oldest first: when it was sent, its tokens, and the tokens before its frame
    _waiting: dict[int, tuple[float, int, int]] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Requests without a frame."""
        return len(self._waiting)

    def on_sent(self, number: int, prompt_tokens: int, now: float) -> None:
        """A request is on its way to the replica."""
        if not self._waiting:
            self.waiting_since = now
        self.waiting_tokens += prompt_tokens
        self._waiting[number] = now, prompt_tokens, BASE_TOKENS + self.waiting_tokens

    def on_frame(self, number: int, now: float) -> None:
        """A frame of a request has arrived; only its first one counts."""
        sent = self._take(number)
        if sent is not None:
            self.frames += 1
            self.last_at = now
            self.slowest_s = max(self.slowest_s * FADING, (now - sent[0]) / sent[2])

    def on_end(self, number: int) -> None:
        """A request is over, with a frame or without."""
        self._take(number)

    def is_silent(self, now: float) -> bool:
        """Whether the replica takes requests and answers none."""
        if self.frames < MIN_FRAMES or not self._waiting:
            return False
        silent_s = now - max(self.last_at, self.waiting_since)
        return silent_s > max(SILENCE_FLOOR_S, FACTOR * self.slowest_s * (BASE_TOKENS + self.waiting_tokens))

    def _take(self, number: int) -> tuple[float, int, int] | None:
        sent = self._waiting.pop(number, None)
        if sent is not None:
            self.waiting_tokens -= sent[1]
        return sent
