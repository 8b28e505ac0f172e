"""How a function or a method of vLLM is replaced by one of ours that calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have `around` called in place of the function `name` of a module, a class or an object of vLLM, with that
    function as its first argument. A second call changes nothing: a process installs its patches more than once."""
    original = getattr(owner, name)
    if getattr(original, "is_ours", False):
        return

    @functools.wraps(original)
    def wrapped(*given: Any, **named: Any) -> Any:
        return around(original, *given, **named)

    wrapped.is_ours = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
