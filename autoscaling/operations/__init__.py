"""What an operator sees and changes of a running application: its state with reasons, its drains, its
logs.

Decides: how a state reads, what a name of a replica or node means, when a drain has ended, the order of log lines.
In: Serve's details, Ray's nodes, the quota actor's figures. Out: states, reasons, progress.
Never: starts or deploys anything, or knows the machine that it runs on.

Modules that import Ray are exported unloaded: a terminal has none.
"""

from autoscaling.operations import status
from autoscaling.operations.drain_target import HEAD_RESOURCE, DrainTarget
from autoscaling.operations.event_filter import EventFilter, RecordAnswers
from autoscaling.operations.log_search import LogLevel, LogLine, in_order, wanted_lines
from autoscaling.operations.status import FAILED, FIXED

__all__ = [
    "FAILED",
    "FIXED",
    "HEAD_RESOURCE",
    "DrainTarget",
    "EventFilter",
    "LogLevel",
    "LogLine",
    "RecordAnswers",
    "application",
    "draining",
    "in_order",
    "node_logs",
    "ray_drains",
    "scraped",
    "serve_controller",
    "status",
    "wanted_lines",
]
