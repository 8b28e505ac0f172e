"""The declaration of the application to Serve's controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

from autoscaling.operations import application, serve_controller, status
from serve_app.errors import Unavailable
from serve_app.settings import as_change, with_other_applications
from serve_app.system import writes_json


def declare(entry: Mapping[str, Any], *, is_repeat: bool = False, **serve_options: Any) -> dict[str, Any]:
    """Declare one application to Serve's controller, as `serve deploy` does, in addition to those declared before;
    returns once the controller has it. A running application of the same name is changed.

    Returns the details from before.

    Args:
        entry: as `serve_app.settings.serve_config.application` makes it.
        is_repeat: it was declared before, and is declared again as it was.
        serve_options: `http_options` and `proxy_location`, as in Serve's configuration; the running Serve keeps its
            own without them.

    Raises:
        RuntimeError: Serve refuses it; nothing has changed then.
    """
    logs = (entry.get("args") or {}).get("logs") or {}
    is_json = writes_json() or logs.get("format") == "json"
    logging_config = {"encoding": "JSON"} if is_json else None  # of Serve's controller and HAProxy's manager
    serve.start(**serve_options, logging_config=logging_config)
    client = serve_controller.serve_client()
    details = client.get_serve_details()
    if not is_repeat:
        entry = {**entry, "args": as_change(entry["args"], status.declared_models(details))}
    config = {"applications": with_other_applications(entry, details), **serve_options}
    client.deploy_apps(ServeDeploySchema.model_validate(config))
    return details  # type: ignore[no-any-return]


def declaration() -> dict[str, Any] | None:
    """The last declaration of the application; None: there was none, or Serve does not answer."""
    try:
        return status.declared(application.details(application.ANSWER_S))
    except (RayServeException, Unavailable):
        return None
