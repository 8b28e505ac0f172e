"""vLLM's own metrics of all engines, as a part of an exposition.

Each engine replica writes its families itself, with the labels `model` and `replica` (`engine.own_metrics`): a router
with a hundred engines then joins bytes, and writes no samples.
"""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.transport import EngineTexts


def passed_on(engines: Iterable[EngineTexts]) -> bytes:
    """Each family once, with the samples of all engines. Where engines of two releases describe a family differently,
    the first description counts."""
    heads: dict[str, bytes] = {}
    samples: dict[str, list[bytes]] = {}
    for families in engines:
        for name, (head, lines) in families.items():
            heads.setdefault(name, head)
            samples.setdefault(name, []).append(lines)
    return b"".join(heads[name] + b"".join(samples[name]) for name in heads)
