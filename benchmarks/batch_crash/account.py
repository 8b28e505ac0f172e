"""Is every row there once, with the answer it has undisturbed; and how many of them ran more than once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.batches import text_of

SHOWN = 5  # custom ids of each mistake


@dataclass(frozen=True, slots=True)
class Account:
    """Custom ids of what is wrong with the files of a batch.

    Args:
        missing: in neither file. duplicated: more than once in both together.
        failed: in the error file. wrong: with another answer. unknown: not in the input.
    """

    missing: Sequence[str]
    duplicated: Sequence[str]
    failed: Sequence[str]
    wrong: Sequence[str]
    unknown: Sequence[str]

    @property
    def is_clean(self) -> bool:
        return not (self.missing or self.duplicated or self.failed or self.wrong or self.unknown)

    def as_json(self) -> dict[str, Any]:
        counts = {name: len(getattr(self, name)) for name in ("missing", "duplicated", "failed", "wrong", "unknown")}
        samples = {name: list(getattr(self, name))[:SHOWN] for name, count in counts.items() if count}
        return counts | ({"samples": samples} if samples else {})


def account(expected: Mapping[str, str], output: str, errors: str) -> Account:
    """The files of a batch against the undisturbed answers by custom id.

    Raises:
        ValueError: a line is no JSON, or has no custom id.
    """
    answered = _lines(output)
    failed = _lines(errors)
    counts = Counter([name for name, _ in answered] + [name for name, _ in failed])
    return Account(
        missing=[name for name in expected if not counts[name]],
        duplicated=[name for name, count in counts.items() if count > 1],
        failed=[name for name, _ in failed],
        wrong=[name for name, line in answered if name in expected and _answer(line) != expected[name]],
        unknown=[name for name in counts if name not in expected],
    )


def _lines(text: str) -> list[tuple[str, Any]]:
    found = [json.loads(line) for line in text.splitlines() if line.strip()]
    for line in found:
        if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
            raise ValueError(f"a line without a custom id: {str(line)[:200]}")
    return [(line["custom_id"], line) for line in found]


def _answer(line: Any) -> str | None:
    """The text of an answer; None: it is none."""
    response = line.get("response") or {}
    if response.get("status_code") != 200:
        return None
    try:
        return text_of(response["body"])
    except (KeyError, IndexError, TypeError):
        return None


@dataclass(slots=True)
class EngineCounts:
    """How often engines began a row, by the engines' own counters of prompt tokens, each read last before its engine
    was killed. What an engine began between that look and its death is not counted."""

    prompt_tokens: int  # of a row
    _last: dict[str, float] = field(default_factory=dict)

    def look(self, metrics: str) -> None:
        """Take in what GET /metrics says now."""
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name == "serve_app_engine_prompt_tokens_total":
                    replica = sample.labels["replica"]
                    self._last[replica] = max(self._last.get(replica, 0.0), sample.value)

    @property
    def begun(self) -> int:
        """Rows that engines began, each as often as one did."""
        return round(sum(self._last.values()) / self.prompt_tokens)

    @property
    def engines(self) -> int:
        return len(self._last)


def rerun_share(begun: int, rows: int) -> float:
    """The runs beyond one for each row, over the rows."""
    return round(max(0, begun - rows) / rows, 4)
