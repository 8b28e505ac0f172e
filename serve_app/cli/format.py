"""One-line texts about an instance: a curl command for it, and its state.

Invariant: a command can be pasted into a shell unchanged.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from serve_app.settings import Settings


def curl_line(url: str, key: str | None, settings: Settings) -> str:
    """A curl command with a request to the first model."""
    model = settings.models[0]
    body: dict[str, Any]
    if model.task == "embed":
        path, body = "/v1/embeddings", {"model": model.name, "input": "Hello"}
    else:
        messages = [{"role": "user", "content": "Hello"}]
        path, body = "/v1/chat/completions", {"model": model.name, "messages": messages, "max_tokens": 32}
    bearer = shlex.quote(f"Authorization: Bearer {key}") if key else '"Authorization: Bearer $API_KEY"'
    return f"curl {url}{path} -H {bearer} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def replica_states(status: Mapping[str, Any]) -> str:
    """The replica counts, like `tiny 1/2 (1 starting)  router 1`."""
    parts = []
    for model in status["models"]:
        states = [replica["state"] for replica in model["replicas"]]
        ready = states.count("RUNNING")
        others = sorted({state.lower().replace("_", " ") for state in states if state != "RUNNING"})
        rest = f" ({', '.join(others)})" if others else ""
        parts.append(f"{model['name']} {ready}/{model['target']}{rest}")
    if status["routers"]:
        parts.append(f"router {sum(replica['state'] == 'RUNNING' for replica in status['routers'])}")
    return "  ".join(parts)


def state_line(status: Mapping[str, Any], *, with_state: bool = True) -> str:
    parts = [status["state"] if with_state else "", replica_states(status), status["message"]]
    return "  ".join(part for part in parts if part)


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
