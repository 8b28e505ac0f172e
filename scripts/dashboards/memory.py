"""GPU memory: the ledger by device, the replicas' grants, and their KV tokens."""

from __future__ import annotations

from scripts.dashboards import questions
from scripts.dashboards.boards import Board, Kind, Panel, Query, Section, Unit, Variable
from scripts.dashboards.expressions import any_of, now
from serve_app.router.metrics.table import ClusterFigure, Figure

MODEL = questions.MODEL


def memory() -> Board:
    return Board(
        "serve-app-memory",
        "serve-app: GPU memory",
        "What the ledger has granted, what is free, and who waits for it.",
        (Section("Devices", _devices()), Section("Replicas", _replicas())),
        (Variable("model", Figure.WAITING),),
    )


def _devices() -> tuple[Panel, ...]:
    memory_of = now(ClusterFigure.GPU_MEMORY)
    granted = now(ClusterFigure.GPU_MEMORY, kind="granted").summed("node", "device")
    blocked = now(Figure.BLOCKED, model=MODEL).highest("model", "reason")
    short = now(ClusterFigure.REPLICAS_SHORT, model=MODEL).summed("model")
    lost = now(Figure.GPU_FRAGMENTATION).highest("node")
    return (
        questions.what_memory_does(),
        Panel(
            "Granted, of each device",
            "To engines, of all bytes of the device.",
            Unit.RATIO,
            (Query(granted.over(memory_of.summed("node", "device")), "{{node}}/{{device}}"),),
        ),
        Panel(
            "Free, of each device",
            "An engine needs its bytes on one device, or the same on each of several.",
            Unit.BYTES,
            (Query(now(ClusterFigure.GPU_MEMORY, kind="free").summed("node", "device"), "{{node}}/{{device}}"),),
        ),
        Panel(
            "Fragmentation",
            "Share of a node's free memory into which no engine of a present model fits. `serve-app defrag --plan`.",
            Unit.RATIO,
            (Query(lost.or_zero("node", "no node"), "{{node}}"),),
        ),
        Panel(
            "Waits for memory",
            "Engines that wait to load, and models of which scaling wants more than fits.",
            Unit.COUNT,
            (
                Query(blocked.or_zero("model", "no model"), "{{model}} engines blocked: {{reason}}"),
                Query(short.or_zero("model", "no model"), "{{model}} lacks memory for more"),
            ),
        ),
        Panel(
            "Agent sessions",
            "Sessions that hold KV tokens, and those that wait for them.",
            Unit.COUNT,
            (
                Query(
                    now(ClusterFigure.SESSIONS, model=MODEL).summed("model", "state").or_zero("state"),
                    "{{model}} {{state}}",
                ),
            ),
        ),
    )


def _replicas() -> tuple[Panel, ...]:
    bytes_of = now(ClusterFigure.REPLICA_MEMORY, model=MODEL).summed("model", "replica", "kind")
    used = now(ClusterFigure.KV_USED_RATIO, model=MODEL).highest("model", "replica")
    tokens = now(ClusterFigure.KV_TOKENS, model=MODEL, kind=any_of("used", "sessions", "free"))
    return (
        Panel(
            "Bytes of each replica",
            "Granted, and measured on a GPU. A replica that uses more than its grant drains and restarts.",
            Unit.BYTES,
            (Query(bytes_of, "{{model}} {{replica}} {{kind}}"),),
        ),
        Panel(
            "KV tokens in use",
            "Of each replica, over all that it has.",
            Unit.RATIO,
            (Query(used, "{{model}} {{replica}}"),),
        ),
        Panel(
            "KV tokens by model",
            "Used by requests, reserved for sessions, and free.",
            Unit.COUNT,
            (Query(tokens.summed("model", "kind"), "{{model}} {{kind}}"),),
            Kind.STACK,
        ),
    )
