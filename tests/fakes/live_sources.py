"""Who is asked for consoles: nobody answers, unless a test says what."""

from __future__ import annotations

from typing import Any

from serve_app.http.console import LiveSources


async def away(*_: Any) -> Any:
    """No answer."""
    raise TimeoutError


def silent_sources(**known: Any) -> LiveSources:
    """Sources of which only those in `known` answer."""
    given: dict[str, Any] = {
        "router": "router",
        "router_names": frozenset,
        "models": dict,
        "quota": away,
        "routers": away,
        "state": away,
        "addresses": away,
        "batches": away,
    }
    return LiveSources(**given | known)
