"""What can be configured.

Decides: which configuration is valid, its defaults and presets, and which change restarts which deployment.
In: YAML with `${NAME}`, or a mapping. Out: the frozen `Settings` tree, Serve's own configuration of it, the API key of
the key file.
Never: starts anything, or imports Ray.
"""

from serve_app.settings.batch import BatchSettings, RedisSettings, RedisStreamSettings
from serve_app.settings.changes import Change, changes, declared_settings
from serve_app.settings.field_words import counterpart
from serve_app.settings.jwt import JwtSettings
from serve_app.settings.key_file import DEFAULT_KEY_FILE, load_or_create_key, new_key
from serve_app.settings.mistakes import nearest
from serve_app.settings.model import (
    DEFAULT_KV_CACHE_GB,
    DEFAULT_MAX_AUDIO_S,
    DEFAULT_MAX_IMAGE_PIXELS,
    DEFAULT_POLICY,
    GB,
    AutoscaleSettings,
    BatchingSettings,
    ModelSettings,
    ScriptedTurn,
    SimulatedSettings,
)
from serve_app.settings.presets import PRESETS
from serve_app.settings.reading import load, read_file
from serve_app.settings.remote_changes import remote_settings
from serve_app.settings.routes import RouteSettings
from serve_app.settings.serve_config import (
    ProxyLocation,
    application,
    as_change,
    configuration_digest,
    split_arguments,
    with_other_applications,
    with_variables,
)
from serve_app.settings.settings import (
    AdmissionSettings,
    AuthSettings,
    HttpSettings,
    KeySettings,
    LimitSettings,
    QuotaSettings,
    ResponseSettings,
    Settings,
    TraceSettings,
    examine,
    parse,
)
from serve_app.settings.variables import masked, resolve
from serve_app.settings.versions import code_version, engine_version

__all__ = [
    "DEFAULT_KEY_FILE",
    "DEFAULT_KV_CACHE_GB",
    "DEFAULT_MAX_AUDIO_S",
    "DEFAULT_MAX_IMAGE_PIXELS",
    "DEFAULT_POLICY",
    "GB",
    "PRESETS",
    "AdmissionSettings",
    "AuthSettings",
    "AutoscaleSettings",
    "BatchSettings",
    "BatchingSettings",
    "Change",
    "HttpSettings",
    "JwtSettings",
    "KeySettings",
    "LimitSettings",
    "ModelSettings",
    "ProxyLocation",
    "QuotaSettings",
    "RedisSettings",
    "RedisStreamSettings",
    "ResponseSettings",
    "RouteSettings",
    "ScriptedTurn",
    "Settings",
    "SimulatedSettings",
    "TraceSettings",
    "application",
    "as_change",
    "changes",
    "code_version",
    "configuration_digest",
    "counterpart",
    "declared_settings",
    "engine_version",
    "examine",
    "load",
    "load_or_create_key",
    "masked",
    "nearest",
    "new_key",
    "parse",
    "read_file",
    "remote_settings",
    "resolve",
    "split_arguments",
    "with_other_applications",
    "with_variables",
]
