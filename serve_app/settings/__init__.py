"""What can be configured.

Decides: which configuration is valid, its defaults and presets, and which change restarts which deployment.
In: YAML or a mapping. Out: the frozen `Settings` tree, Serve's own configuration of it, the API key of the key file.
Never: starts anything, or imports Ray.
"""

from serve_app.settings.key_file import DEFAULT_KEY_FILE, load_or_create_key
from serve_app.settings.model import DEFAULT_KV_CACHE_GB, AutoscaleSettings, ModelSettings, SimulatedSettings
from serve_app.settings.presets import PRESETS
from serve_app.settings.serve_config import (
    BUILD,
    ProxyLocation,
    application,
    deployment_config,
    with_other_applications,
)
from serve_app.settings.settings import (
    DEFAULT_GUARD_SLOTS_SHARE,
    DEFAULT_MAX_QUEUED,
    DEFAULT_MAX_WAIT_S,
    AdmissionSettings,
    AuthSettings,
    HttpSettings,
    KeySettings,
    QuotaSettings,
    Settings,
    load,
    parse,
)
from serve_app.settings.versions import engine_version, router_version

__all__ = [
    "BUILD",
    "DEFAULT_GUARD_SLOTS_SHARE",
    "DEFAULT_KEY_FILE",
    "DEFAULT_KV_CACHE_GB",
    "DEFAULT_MAX_QUEUED",
    "DEFAULT_MAX_WAIT_S",
    "PRESETS",
    "AdmissionSettings",
    "AuthSettings",
    "AutoscaleSettings",
    "HttpSettings",
    "KeySettings",
    "ModelSettings",
    "ProxyLocation",
    "QuotaSettings",
    "Settings",
    "SimulatedSettings",
    "application",
    "deployment_config",
    "engine_version",
    "load",
    "load_or_create_key",
    "parse",
    "router_version",
    "with_other_applications",
]
