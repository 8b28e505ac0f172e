"""HAProxy's own metrics that a scrape passes on, under HAProxy's names: of some 130, those that an operator watches.

Invariant: the labels of a row are `node` and HAProxy's own, and of these none names a server: routers come and go.
"""

from __future__ import annotations

from enum import Enum

from serve_app.router.metrics.metric_row import MetricRow

OF_PROXY = ("node", "proxy")


class HaproxyFigure(Enum):
    """What a scrape reads from the HAProxy of each node. `proxy`: a frontend or backend."""

    START_TIME = MetricRow(
        "haproxy_process_start_time_seconds",
        "gauge",
        ("node",),
        "when it began, in seconds since 1970: counters begin anew with each change of routers",
    )
    CONNECTIONS = MetricRow("haproxy_process_current_connections", "gauge", ("node",), "open connections")
    MAX_CONNECTIONS = MetricRow("haproxy_process_max_connections", "gauge", ("node",), "their bound")
    FRONTEND_SESSIONS = MetricRow("haproxy_frontend_current_sessions", "gauge", OF_PROXY, "clients' connections")
    FRONTEND_SESSIONS_TOTAL = MetricRow(
        "haproxy_frontend_sessions", "counter", OF_PROXY, "clients' connections since the start"
    )
    FRONTEND_CONNECTIONS_DENIED = MetricRow(
        "haproxy_frontend_denied_connections",
        "counter",
        OF_PROXY,
        "connections closed because their address has too many",
    )
    FRONTEND_REQUESTS = MetricRow("haproxy_frontend_http_requests", "counter", OF_PROXY, "requests")
    FRONTEND_RESPONSES = MetricRow(
        "haproxy_frontend_http_responses",
        "counter",
        (*OF_PROXY, "code"),
        "answers by the class of their status, `1xx` to `5xx`, `other`",
    )
    FRONTEND_REQUEST_ERRORS = MetricRow(
        "haproxy_frontend_request_errors", "counter", OF_PROXY, "requests that could not be read"
    )
    FRONTEND_BYTES_IN = MetricRow("haproxy_frontend_bytes_in", "counter", OF_PROXY, "bytes from clients")
    FRONTEND_BYTES_OUT = MetricRow("haproxy_frontend_bytes_out", "counter", OF_PROXY, "bytes to clients")
    BACKEND_STATUS = MetricRow(
        "haproxy_backend_status",
        "gauge",
        (*OF_PROXY, "state"),
        "1: the state of the routers as a whole, `UP` or `DOWN`",
    )
    BACKEND_SERVERS = MetricRow("haproxy_backend_active_servers", "gauge", OF_PROXY, "routers that take requests")
    BACKEND_SESSIONS = MetricRow("haproxy_backend_current_sessions", "gauge", OF_PROXY, "requests at routers")
    BACKEND_QUEUE = MetricRow(
        "haproxy_backend_current_queue", "gauge", OF_PROXY, "requests that wait in HAProxy for a router"
    )
    BACKEND_RESPONSES = MetricRow(
        "haproxy_backend_http_responses",
        "counter",
        (*OF_PROXY, "code"),
        "routers' answers by the class of their status",
    )
    BACKEND_CONNECTION_ERRORS = MetricRow(
        "haproxy_backend_connection_errors", "counter", OF_PROXY, "connections to a router that failed"
    )
    BACKEND_RESPONSE_ERRORS = MetricRow(
        "haproxy_backend_response_errors",
        "counter",
        OF_PROXY,
        "answers of a router that broke off or could not be read",
    )
    BACKEND_RETRIES = MetricRow("haproxy_backend_retry_warnings", "counter", OF_PROXY, "requests sent again")
    BACKEND_SERVER_ABORTS = MetricRow("haproxy_backend_server_aborts", "counter", OF_PROXY, "answers whose router left")
