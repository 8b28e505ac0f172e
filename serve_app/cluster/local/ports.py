"""Ports of an instance, so that several instances and a user's own Ray can run on one machine.

The kernel chooses the ports of Ray's own services; Serve's fixed ports come from one block per instance. Invariant: two
running instances never share a block, because each keeps the block's first port bound (not listening) while its owner
lives; the kernel releases the port when the owner dies.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from serve_app.errors import ConfigError, Unavailable
from serve_app.system import holder_of

# Above the worker ports of a default `ray start` (10002 to 19999), below the kernel's usual ephemeral range (32768).
FIRST_PORT = 20_000
LAST_PORT = 32_700
INGRESS_PORTS = 256  # the port of an ended router replica stays unused for an hour (HARD_STOP_S)
BLOCK_PORTS = INGRESS_PORTS + 16
PROBED_INGRESS_PORTS = 8  # probed before a block is taken; Serve itself skips taken ports further up


class PortBlock(NamedTuple):
    """The ports of one instance; `base` is the reservation itself.

    Args:
        http: the endpoint, if the caller did not choose a port.
        head_metrics: metrics of Ray's head; loopback. Ray's default is one fixed port for the whole machine.
    """

    base: int
    http: int
    fallback_http: int
    fallback_grpc: int
    dashboard: int
    head_metrics: int

    @property
    def ingress(self) -> range:
        return range(self.base + 16, self.base + BLOCK_PORTS)

    @property
    def probed(self) -> list[int]:
        return [*range(self.http, self.head_metrics + 1), *self.ingress[:PROBED_INGRESS_PORTS]]


def can_bind(host: str, port: int) -> bool:
    """Whether a server could listen on host:port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections do not count
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", param="host") from None
    return True


def require_free(host: str, port: int) -> None:
    """Raises ConfigError, with the port's holder if visible, unless a server could listen on host:port."""
    if can_bind(host, port):
        return
    holder = holder_of(port)
    if holder is not None:
        raise ConfigError(f"port {port} is taken by {holder.process} (process {holder.pid})", param="port")
    reason = "needs more rights than this user has" if port < 1024 else "is taken"
    raise ConfigError(f"port {port} {reason}; choose another one with --port", param="port")


@contextmanager
def reserved_block(host: str, seed: int | None = None) -> Iterator[PortBlock]:
    """A block of free ports, reserved until the context ends.

    Raises:
        Unavailable: every block has a port in use.
    """
    bases = range(FIRST_PORT, LAST_PORT - BLOCK_PORTS + 1, BLOCK_PORTS)
    for base in random.Random(seed).sample(bases, len(bases)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reservation:
            try:
                reservation.bind(("127.0.0.1", base))
            except OSError:
                continue  # taken by another instance or another server
            block = PortBlock(*range(base, base + 6))
            if all(can_bind(host, port) for port in block.probed):
                yield block
                return
    raise Unavailable(f"no free block of ports between {FIRST_PORT} and {LAST_PORT}", code="no_ports")
