"""The engine replica's side of a channel: frames of all requests of one router leave in one message per loop turn.

Invariant: frames of a request leave in the order in which they were put. While the router keeps up, no frame is held
back; while it is behind, waiting frames of one request are merged instead of queued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from serve_app.errors import EngineFailed
from serve_app.transport.messages import Batch, Frame, batch_encoder

# A message above gRPC's limit (4 MiB by default) would break the channel for all its requests, and a long message
# delays the frames of other requests.
MAX_MESSAGE_BYTES = 2**20
MAX_WAITING_BYTES = 256 * 2**20  # for a router that does not read; above it, each request with a new frame ends
FRAME_BYTES = 32  # the most that a frame has besides its body and tokens
TOKEN_BYTES = 5  # the most that a token id has in msgpack


class FrameBatcher:
    """Frames that wait to be sent to one router. Not thread-safe: one event loop.

    Args:
        send: called with each encoded `Batch`, one turn of the event loop after its first frame was put.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self.frames: dict[int, Frame] = {}  # by request number: a later frame is merged into the waiting one
        self._send = send
        self._bytes = 0
        self._slots = 0
        self._drain_s: float | None = None
        self._fingerprint: str | None = None
        self._operations: list[str] | None = None
        self.is_paused = self._is_scheduled = False

    def put(self, frame: Frame) -> None:
        """Add a frame; merges it into a waiting frame of the same request.

        Raises:
            EngineFailed: more than `MAX_WAITING_BYTES` would wait.
        """
        if self._bytes + len(frame.body) > MAX_WAITING_BYTES:
            raise EngineFailed("the router reads too slowly", code="slow_router")
        self._bytes += len(frame.body)
        waiting = self.frames.get(frame.number)
        self.frames[frame.number] = frame if waiting is None else merge(waiting, frame)
        self._schedule()

    def set_slots(
        self,
        slots: int,
        drain_s: float | None = None,
        fingerprint: str | None = None,
        operations: list[str] | None = None,
    ) -> None:
        """Send the router the number of the engine's slots with the next message; for the others see `Batch`."""
        self._slots = slots
        self._drain_s = drain_s
        self._fingerprint = fingerprint
        self._operations = operations
        self._schedule()

    def pause(self, is_paused: bool) -> None:
        """Whether frames wait, since the router reads too slowly."""
        self.is_paused = is_paused
        self._schedule()

    def _schedule(self) -> None:
        if not (self._is_scheduled or self.is_paused):
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        while (self.frames or self._slots) and not self.is_paused:
            state = (self._slots, self._drain_s, self._fingerprint, self._operations) if self._slots else ()
            batch = Batch(self.next_frames(), *state)
            self._slots = 0
            self._send(batch_encoder.encode(batch))  # may call `pause`

    def next_frames(self) -> list[Frame]:
        """The frames of the next message: all that fit, oldest first; a frame that is too long is split."""
        taken: list[Frame] = []
        room = MAX_MESSAGE_BYTES
        while self.frames and room > 0:
            number, frame = next(iter(self.frames.items()))
            if len(frame.body) > room:
                head, rest = split(frame, room)
                del self.frames[number]
                self.frames[number] = rest  # at the end: frames of other requests pass between its parts
                taken.append(head)
                break
            del self.frames[number]
            taken.append(frame)
            room -= len(frame.body) + FRAME_BYTES + TOKEN_BYTES * sum(map(len, frame.groups))
        self._bytes -= sum(len(frame.body) for frame in taken)
        return taken


def split(frame: Frame, size: int) -> tuple[Frame, Frame]:
    """Split a frame after `size` bytes. A stream cannot continue from between the two: the second has the events."""
    head = Frame(frame.number, frame.body[:size], frame.status, frame.media, prompt=frame.prompt)
    return head, msgspec.structs.replace(frame, body=frame.body[size:], status=0, media="", prompt=None)


def merge(first: Frame, second: Frame) -> Frame:
    """Merge two consecutive frames of one request."""
    return msgspec.structs.replace(
        second,
        body=first.body + second.body,
        status=first.status or second.status,
        media=first.media or second.media,
        groups=first.groups + second.groups,
        events=first.events + second.events,
        prompt=first.prompt or second.prompt,
    )
