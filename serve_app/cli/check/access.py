"""The findings about keys, tenants and logs that are allowed, and do nothing, lock people out or show prompts. Pure.

Invariant: all of them are warnings: keys of the store, which nobody asks here, may settle them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime

from serve_app.cli.check.findings import Finding, finding
from serve_app.settings import Settings, nearest


def check_access(settings: Settings, now: datetime) -> list[Finding]:
    """What is odd about keys and tenants. `now`: with its offset from UTC."""
    found = [*_keys(settings, now), *_tenants(settings)]
    return [*found, finding("prompts_in_logs", "logs.prompts")] if settings.logs.prompts else found


def _keys(settings: Settings, now: datetime) -> Iterator[Finding]:
    models = [*(model.name for model in settings.models), *(route.name for route in settings.routes)]
    keys = settings.auth.keys
    for index, key in enumerate(keys):
        path = f"auth.keys.{index}"
        if key.expires_at is not None and key.expires_at <= now:
            yield finding("key_expired", f"{path}.expires_at", at=key.expires_at.isoformat())
        for number, name in enumerate(key.models or ()):
            yield from _unknown_model(f"{path}.models.{number}", name, models)
    jwt = settings.auth.jwt
    for number, name in enumerate((jwt and jwt.models) or ()):
        yield from _unknown_model(f"auth.jwt.models.{number}", name, models)
    valid = [key for key in keys if key.expires_at is None or key.expires_at > now]
    if keys and not any(key.admin for key in valid) and (jwt is None or jwt.roles.admin is None):
        yield finding("no_operator", "auth.keys")


def _tenants(settings: Settings) -> Iterator[Finding]:
    models = [model.name for model in settings.models]
    known = {key.tenant for key in settings.auth.keys} or {"default"}  # a generated key's
    jwt = settings.auth.jwt
    if jwt is not None:
        known |= set(settings.admission.tenants) if jwt.tenant is None else {jwt.tenant}  # a claim may name any
    for name, tenant in settings.admission.tenants.items():
        path = f"admission.tenants.{name}"
        if tenant.share and name not in known:
            yield finding("share_without_key", f"{path}.share", tenant=name, share=f"{tenant.share:g}")
        for model in tenant.models:
            yield from _unknown_model(f"{path}.models.{model}", model, models)


def _unknown_model(path: str, name: str, models: Collection[str]) -> Iterator[Finding]:
    if name not in models:
        near = nearest(name, models)
        advice = f"did you mean {near}?" if near else f"there are: {', '.join(models)}"
        yield finding("no_such_name", path, model=name, advice=advice)
