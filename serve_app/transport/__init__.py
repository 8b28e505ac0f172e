"""The data path between a router and an engine replica.

Decides: how frames are batched, which connection carries a request, and when a connection counts as lost.
In: requests of a router, frames of an engine. Out: the same, in order, each request ended exactly once.
Never: retries a request, and never looks into its content.
"""

from serve_app.transport.channel import Channel
from serve_app.transport.frame_batcher import Outbox
from serve_app.transport.messages import (
    ENDED,
    NO_SLOTS,
    EngineBackend,
    EngineInfo,
    EngineLoad,
    Frame,
    Piece,
    Submit,
    Usage,
    WireAddress,
)
from serve_app.transport.stream import Stream, Unread
from serve_app.transport.tcp import WiredHandle
from serve_app.transport.tcp_server import WireServer

__all__ = [
    "ENDED",
    "NO_SLOTS",
    "Channel",
    "EngineBackend",
    "EngineInfo",
    "EngineLoad",
    "Frame",
    "Outbox",
    "Piece",
    "Stream",
    "Submit",
    "Unread",
    "Usage",
    "WireAddress",
    "WireServer",
    "WiredHandle",
]
