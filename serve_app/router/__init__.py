"""The models of one router replica: queue client, grants, retries, replicas and their health.

Decides: which granted replica runs a request, when a request is retried, and which replicas are ejected.
In: arrivals, grants of the queue, frames of replicas. Out: a stream of frames for each request, metrics, sessions.
Never: reads HTTP, and never orders requests itself; `core.queue` and the quota actor do.
"""

from serve_app.router.limit_client import LimitCharge, LimitClient
from serve_app.router.live import AskParts, all_parts, router_part
from serve_app.router.metrics import RouterMetrics
from serve_app.router.model_registry import ModelRegistry
from serve_app.router.model_router import ModelRouter
from serve_app.router.other_routers import AllRouters, RouterAnswers
from serve_app.router.queue_client import QueueClient
from serve_app.router.receipt_search import ReceiptSearch
from serve_app.router.request_log import RequestLog
from serve_app.router.runs import MAX_NOTES, Aside, RequestRuns
from serve_app.router.scaling_report import scaling_report
from serve_app.router.scrape import ClusterSources, Scrape
from serve_app.router.sessions import SessionClient
from serve_app.router.throughput import Throughput
from serve_app.router.usage_reporter import USAGE_FOLDER, UsageReporter

__all__ = [
    "MAX_NOTES",
    "USAGE_FOLDER",
    "AllRouters",
    "Aside",
    "AskParts",
    "ClusterSources",
    "LimitCharge",
    "LimitClient",
    "ModelRegistry",
    "ModelRouter",
    "QueueClient",
    "ReceiptSearch",
    "RequestLog",
    "RequestRuns",
    "RouterAnswers",
    "RouterMetrics",
    "Scrape",
    "SessionClient",
    "Throughput",
    "UsageReporter",
    "all_parts",
    "router_part",
    "scaling_report",
]
