"""Open-weight models on a Ray cluster, served to many tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve_app.client import connect

__all__ = ["connect"]


def __getattr__(name: str) -> Any:
    """Imports `connect` on first use, since it imports Ray."""
    if name == "connect":
        from serve_app.client import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
