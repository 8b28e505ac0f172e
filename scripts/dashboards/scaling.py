"""Replicas: how many there are in which state, the load that scaling looks at, and those that were lost."""

from __future__ import annotations

from scripts.dashboards import questions
from scripts.dashboards.boards import RATE, Board, Kind, Panel, Query, Section, Unit, Variable
from scripts.dashboards.expressions import growth, now, rate
from serve_app.router.metrics.haproxy_table import HaproxyFigure
from serve_app.router.metrics.table import ClusterFigure, Figure, Metric

MODEL = questions.MODEL


def scaling() -> Board:
    return Board(
        "serve-app-scaling",
        "serve-app: scaling",
        "Replicas wanted and why, the load that scaling looks at, and what was lost.",
        (Section("", _load()), Section("Health", _health()), Section("Connections", _connections())),
        (Variable("model", Figure.WAITING),),
    )


def _load() -> tuple[Panel, ...]:
    waiting = now(Figure.WAITING, model=MODEL).summed("model")
    granted = now(Figure.SLOTS, model=MODEL, state="granted").summed("model")
    slots = now(Figure.SLOTS, model=MODEL, state="total").highest("model", "replica").summed("model")
    running = now(ClusterFigure.REPLICAS, model=MODEL, state="running").summed("model")
    replicas = now(ClusterFigure.REPLICAS, model=MODEL).summed("model", "state")
    target = now(ClusterFigure.REPLICAS_TARGET, model=MODEL).highest("model")
    reasons = now(ClusterFigure.REPLICAS_REASON, model=MODEL).highest("model", "reason")
    arrivals = rate(Metric.ARRIVALS, RATE, model=MODEL).summed("model")
    return (
        questions.why_it_scaled(),
        Panel(
            "Why so many",
            "The reasons in the course of time, a line at 1 while one holds.",
            Unit.COUNT,
            (Query(reasons, "{{model}} {{reason}}"),),
            Kind.STACK,
        ),
        Panel(
            "Missing replicas",
            "Those that Serve keeps, less those that run.",
            Unit.COUNT,
            (Query(target.minus(running), "{{model}}"),),
        ),
        Panel(
            "Replicas by state",
            "blocked: waits for memory. loading: starts. draining: ends after its requests.",
            Unit.COUNT,
            (Query(replicas, "{{model}} {{state}}"),),
            Kind.STACK,
        ),
        Panel(
            "Requests a replica",
            "Those that run and those that wait, over the replicas that run. Scaling holds it at "
            "`target_ongoing_requests`.",
            Unit.COUNT,
            (Query(granted.plus(waiting).over(running), "{{model}}"),),
        ),
        Panel("Slots in use", "Over all slots of a model.", Unit.RATIO, (Query(granted.over(slots), "{{model}}"),)),
        Panel("Arrivals", "By model.", Unit.REQUESTS_PER_SECOND, (Query(arrivals, "{{model}}"),), Kind.STACK),
    )


def _health() -> tuple[Panel, ...]:
    ejected = now(Figure.EJECTED, model=MODEL).highest("model")
    ejections = growth(Figure.REPLICA_EJECTIONS, RATE, model=MODEL).summed("model", "reason")
    routers = now(Figure.BUILD_INFO).present("router", "version").counted("version")
    parts = now(ClusterFigure.UP).lowest("part")
    spans = growth(Metric.TRACE_SPANS_DROPPED, RATE).summed("reason").or_zero("reason")
    return (
        Panel(
            "Replicas without requests since they failed",
            "The most that any router sees.",
            Unit.COUNT,
            (Query(ejected, "{{model}}"),),
        ),
        Panel(
            "Replicas taken out",
            "Since the point before, by reason; each router counts its own.",
            Unit.COUNT,
            (Query(ejections, "{{model}} {{reason}}"),),
        ),
        Panel("Routers that answer", "By version.", Unit.COUNT, (Query(routers, "{{version}}"),)),
        Panel(
            "Store", "Bytes of its database.", Unit.BYTES, (Query(now(ClusterFigure.STORE_BYTES).highest(), "store"),)
        ),
        Panel(
            "Use that the store lacks",
            "Ended requests that each router has not reported yet; it reports each second. If they grow, the store "
            "does not answer. Nothing is lost.",
            Unit.COUNT,
            (Query(now(Figure.USAGE_PENDING).summed("router"), "{{router}}"),),
        ),
        Panel(
            "Records and spans lost",
            "Since the point before: records of requests that no disk took, spans that no collector got.",
            Unit.COUNT,
            (
                Query(growth(Metric.RECORDS_LOST, RATE).summed("router"), "records of {{router}}"),
                Query(spans, "spans: {{reason}}"),
            ),
        ),
        Panel("Parts that answer", "1: it answered the scrape.", Unit.COUNT, (Query(parts, "{{part}}"),)),
    )


def _connections() -> tuple[Panel, ...]:
    open_now = now(HaproxyFigure.CONNECTIONS).summed("node")
    most = now(HaproxyFigure.MAX_CONNECTIONS).summed("node")
    answers = rate(HaproxyFigure.FRONTEND_RESPONSES, RATE).summed("code")
    failures = (
        (HaproxyFigure.BACKEND_CONNECTION_ERRORS, "no connection to a router"),
        (HaproxyFigure.BACKEND_RESPONSE_ERRORS, "a router's answer broke off"),
        (HaproxyFigure.BACKEND_SERVER_ABORTS, "a router left"),
        (HaproxyFigure.FRONTEND_CONNECTIONS_DENIED, "an address has too many connections"),
    )
    return (
        Panel("Open connections", "Of all that HAProxy takes.", Unit.RATIO, (Query(open_now.over(most), "{{node}}"),)),
        Panel(
            "Answers by status",
            "Of HAProxy, those of routers and its own.",
            Unit.REQUESTS_PER_SECOND,
            (Query(answers, "{{code}}"),),
            Kind.STACK,
        ),
        Panel(
            "Failures between HAProxy and routers",
            "Since the point before.",
            Unit.COUNT,
            tuple(Query(growth(source, RATE).summed(), name) for source, name in failures),
        ),
        Panel(
            "Routers that take requests",
            "As HAProxy sees it.",
            Unit.COUNT,
            (Query(now(HaproxyFigure.BACKEND_SERVERS).summed("node", "proxy"), "{{node}} {{proxy}}"),),
        ),
    )
