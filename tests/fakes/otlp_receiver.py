"""A collector: takes spans as OTLP in protobuf over HTTP, read by the protocol's own classes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

LOOPBACK = "127.0.0.1"


@dataclass
class OtlpReceiver:
    """What a collector has got.

    Args:
        status: of its answers; takes: cleared, it answers nothing until it is set again.
    """

    url: str = ""
    status: int = 200
    takes: threading.Event = field(default_factory=threading.Event)
    messages: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        """All spans, as they came."""
        resources = [resource for message in self.messages for resource in message.resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]

    @property
    def resource(self) -> dict[str, Any]:
        """The attributes of the process that has sent the spans."""
        (resource,) = {message.resource_spans[0].resource.SerializeToString() for message in self.messages}
        found = type(self.messages[0].resource_spans[0].resource).FromString(resource)
        return attributes_of(found.attributes)


def attributes_of(pairs: Any) -> dict[str, Any]:
    """Attributes of a resource, span or event as plain values."""
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    return getattr(pair.value, pair.value.WhichOneof("value") or "string_value")


@contextlib.contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A collector on loopback, for the block."""
    receiver = OtlpReceiver()
    receiver.takes.set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.takes.wait()
            receiver.paths.append(self.path)
            receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
            if receiver.status == 200:
                receiver.messages.append(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(receiver.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the tests look at what came."""

    server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://{LOOPBACK}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.takes.set()
        server.shutdown()
        server.server_close()
        thread.join()
