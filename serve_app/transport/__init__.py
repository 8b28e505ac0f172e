"""The data path between a router and an engine replica.

Decides: how frames are batched, which connection carries a request, and when a connection counts as lost.
In: requests of a router, frames of an engine. Out: the same, in order, each request ended exactly once.
Never: retries a request or reads its content.
"""

from serve_app.transport.channel import Channel
from serve_app.transport.messages import (
    FINISH_STOP,
    NOT_CONTINUABLE,
    STOPPED,
    EngineBackend,
    EngineInfo,
    EngineLoad,
    EngineTexts,
    FirstTokenReport,
    Frame,
    Submit,
    TcpAddress,
    TokenUsage,
    Unsent,
)
from serve_app.transport.stream import ResponseStream, UnreadBytes
from serve_app.transport.tcp_server import TcpServer

__all__ = [
    "FINISH_STOP",
    "NOT_CONTINUABLE",
    "STOPPED",
    "Channel",
    "EngineBackend",
    "EngineInfo",
    "EngineLoad",
    "EngineTexts",
    "FirstTokenReport",
    "Frame",
    "ResponseStream",
    "Submit",
    "TcpAddress",
    "TcpServer",
    "TokenUsage",
    "UnreadBytes",
    "Unsent",
]
