"""The application of one configuration file as an object, for `serve build`, which gives a builder no arguments:

    SERVE_APP_CONFIG=my.yaml serve build serve_app.configured:application

It prints every deployment as Serve gets it. To deploy, use `serve-app export`: the output of `serve build` names this
module, so the cluster would need the file and the variable where it builds the application.
"""

from __future__ import annotations

import os
from typing import Any

from serve_app.app import build
from serve_app.errors import ConfigError

VARIABLE = "SERVE_APP_CONFIG"


def __getattr__(name: str) -> Any:
    """Builds `application` on first use.

    Raises:
        ConfigError: the variable names no file, or a wrong one.
    """
    if name != "application":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = os.environ.get(VARIABLE)
    if not file:
        raise ConfigError(f"{VARIABLE} is not set: it names the configuration file", param=VARIABLE)
    return build({"config": file})
