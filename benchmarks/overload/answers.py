"""One window of `benchmarks.overload` in figures. Pure.

Percentiles are values that were measured (the smallest with that share at or below it), with their number of samples
beside them. `p99_offered` is over all that were asked for: who got no first token waited for ever, so it is None as
soon as more than one in a hundred did not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common.processes import ENGINE_CORE
from benchmarks.common.stats import lower_quantile, shorten
from benchmarks.overload.offered_load import GROUPS
from benchmarks.overload.open_loop_client import Ended
from benchmarks.overload.plan import Levels

ON_ARRIVAL = ("queue_full", "deadline")  # reasons with which a line refuses at once; a deadline may also pass later
Answers = Sequence["Answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw of one request. Spans in seconds from the moment it was due; `gap_ms` is the mean of its gaps
    between tokens, `late_ms` what the generator was late."""

    number: int
    group: str
    asked_tokens: int
    at_s: float
    outcome: Ended
    code: str
    first_s: float | None
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    gap_ms: float | None
    late_ms: float

    @classmethod
    def of(cls, row: Sequence[Any]) -> Answer:
        """From a row of the generator's result."""
        number, group, asked, at_s, outcome, *rest = row
        return cls(number, group, asked, at_s, Ended(outcome), *rest)

    def inside(self, begin_s: float, span_s: float) -> bool:
        return begin_s <= self.at_s < begin_s + span_s

    def met(self, levels: Levels) -> bool:
        """Whether it counts for goodput: finished, and within both of its levels."""
        if self.outcome is not Ended.FINISHED or self.first_s is None:
            return False
        return self.first_s <= levels.ttft_level_s(self.group) and (self.gap_ms or 0.0) <= levels.itl_level_ms


@dataclass(frozen=True, slots=True)
class Decision:
    """What the router says of one request; spans in seconds from its arrival there."""

    number: int
    outcome: str
    refused: str | None
    granted: bool
    wait_s: float
    total_s: float
    tokens: int
    deadline_s: float | None

    @property
    def on_arrival(self) -> bool:
        """Refused before it waited: a deadline that passes in the line is told when it has passed, not before."""
        return self.refused in ON_ARRIVAL and (self.deadline_s is None or self.total_s < self.deadline_s)


def brief(number: int, receipt: Mapping[str, Any]) -> list[Any]:
    """The fields of a `Decision` from a receipt; its tokens are the estimated ones, by which the line reckons."""
    fields = ("outcome", "refused", "granted", "wait_s", "total_s")
    tokens = receipt["estimated_prompt"] + receipt["estimated_output"]
    return [number, *(receipt[name] for name in fields), tokens, receipt["deadline_s"]]


@dataclass(frozen=True, slots=True)
class Window:
    """One arm at one multiple of capacity: what was measured, and what is made of it."""

    arm: str
    multiple: float
    window_s: float
    levels: Levels
    everybody: Answers
    inside: Answers
    finished: Answers
    decisions: Sequence[Decision]
    raw: Mapping[str, Any]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Window:
        """As it was measured. What finished is what did so while the window was open, whenever it was asked for: a line
        that still grows, or is drained after the load, would make a rate by arrivals exceed the engine's own."""
        everybody = [Answer.of(row) for row in raw["rows"]]
        inside = [one for one in everybody if one.inside(raw["warmup_s"], raw["window_s"])]
        begin_s = raw["warmup_s"]
        end_s = raw["warmup_s"] + raw["window_s"]
        done = (one for one in everybody if one.outcome is Ended.FINISHED)
        finished = [one for one in done if begin_s <= one.at_s + one.ended_s < end_s]
        decisions = [Decision(*one) for one in raw["decisions"]]
        levels = Levels(*raw["levels"])
        return cls(raw["arm"], raw["multiple"], raw["window_s"], levels, everybody, inside, finished, decisions, raw)

    @classmethod
    def pooled(cls, parts: Sequence[Window]) -> Window:
        """Several windows of one arm and multiple as one, as long as all of them together."""
        first = parts[0]
        raws = [part.raw for part in parts]
        raw = {
            **first.raw,
            **{name: sum(one[name] for one in raws) for name in ("cpu_s", "foreign_s", "failed")},
            **{name: _sums(one[name] for one in raws) for name in ("cpu_s_by_role", "engine", "left")},
            "rss_mb": raws[-1]["rss_mb"],
            "failed_samples": [sample for one in raws for sample in one["failed_samples"]],
        }

        def every(name: str) -> list[Any]:
            return [
                replace(one, number=len(parts) * one.number + number)
                for number, part in enumerate(parts)
                for one in getattr(part, name)
            ]

        return replace(
            first,
            window_s=sum(part.window_s for part in parts),
            everybody=every("everybody"),
            inside=every("inside"),
            finished=every("finished"),
            decisions=every("decisions"),
            raw=raw,
        )

    def of_group(self, group: str) -> Answers:
        return [one for one in self.inside if one.group == group]

    def firsts_ms(self, group: str) -> list[float]:
        """TTFT of all requests of a group in the window; infinite for those that got none."""
        return [np.inf if one.first_s is None else one.first_s * 1e3 for one in self.of_group(group)]

    @property
    def goodput(self) -> float:
        """Output tokens a second of requests finished within both levels."""
        return sum(one.output_tokens for one in self.finished if one.met(self.levels)) / self.window_s

    @property
    def throughput(self) -> float:
        return sum(one.output_tokens for one in self.finished) / self.window_s

    def attainment(self) -> dict[str, float | None]:
        """Share of the offered requests within both levels, by group and in all."""
        parts = {group: self.of_group(group) for group in GROUPS} | {"all": self.inside}
        return {
            name: shorten(sum(one.met(self.levels) for one in some) / len(some)) if some else None
            for name, some in parts.items()
        }

    def granted_share(self) -> dict[str, float] | None:
        """Part of the granted tokens that each group had: as the line reckons them, or as vLLM's server served them."""
        tokens = dict.fromkeys(GROUPS, 0)
        group_of = {one.number: one.group for one in self.inside}
        for decision in self.decisions:
            tokens[group_of[decision.number]] += decision.tokens if decision.granted else 0
        if not self.decisions:
            for answer in self.inside:
                tokens[answer.group] += answer.prompt_tokens + answer.output_tokens
        return shares(tokens)

    def abandoned(self) -> dict[str, float | None]:
        """Part of the engine's work on requests that did not finish: of output tokens, and of prompt and output."""
        done = [one for one in self.everybody if one.outcome is Ended.FINISHED]
        made = self.raw["engine"]["generated_tokens"]
        read = self.raw["engine"]["prompt_tokens"]
        kept = sum(one.output_tokens for one in done)
        used = kept + sum(one.prompt_tokens for one in done)
        return {
            "token_share": shorten(max(0.0, 1 - kept / made)) if made else None,
            "work_share": shorten(max(0.0, 1 - used / (made + read))) if made else None,
        }

    def refusals(self) -> dict[str, Any]:
        """How long it took to say no. At the router: from the request's arrival to the decision; for those refused on
        arrival, and apart from them for those that had waited. At the client: from when it was to be sent."""
        refused = [one for one in self.inside if one.outcome is Ended.REFUSED]
        at_once = {one.number: one for one in self.decisions if one.refused is not None and one.on_arrival}
        later = [one for one in self.decisions if one.refused is not None and not one.on_arrival]
        seen = [one.ended_s * 1e3 for one in refused if one.number in at_once or not self.decisions]
        return {
            "router_ms": quantiles([one.total_s * 1e3 for one in at_once.values()]),
            "client_ms": quantiles(seen),
            "dropped_after_ms": quantiles([one.total_s * 1e3 for one in later]),
            "reasons": dict(Counter(one.refused for one in self.decisions if one.refused is not None)),
        }

    def cpu(self) -> dict[str, Any]:
        """Shares of the two cores in the window: EngineCore's, and the other's with all that runs there."""
        roles = {role: used / self.window_s for role, used in self.raw["cpu_s_by_role"].items()}
        clients = self.raw["cpu_s"] / self.window_s
        others = sum(share for role, share in roles.items() if role != ENGINE_CORE)
        return {
            "engine_core": shorten(roles.get(ENGINE_CORE, 0.0)),
            "other_core": shorten(others + clients),
            "by_role": {role: shorten(share) for role, share in roles.items() if share} | {"clients": shorten(clients)},
            "foreign": shorten(self.raw["foreign_s"] / self.window_s),
        }

    def seen_figures(self) -> dict[str, Any]:
        """What clients see of any server, plain for JSON."""
        groups = {group: self.of_group(group) for group in GROUPS}
        return {
            "offered_per_s": shorten(len(self.inside) / self.window_s),
            "offered": {group: len(some) for group, some in groups.items()},
            "outcomes": {group: dict(Counter(one.outcome.value for one in some)) for group, some in groups.items()},
            "ttft_ms": {group: self._ttft(group) for group in GROUPS},
            "itl_ms": quantiles([one.gap_ms for one in self.inside if one.gap_ms is not None]),
            "attainment": self.attainment(),
            "goodput_tokens_per_s": shorten(self.goodput),
            "tokens_per_s": shorten(self.throughput),
            "granted_share": self.granted_share(),
            "generator_late_ms": quantiles([one.late_ms for one in self.inside]),
        }

    def figures(self) -> dict[str, Any]:
        """All of it, with what the server says of itself."""
        return self.seen_figures() | {
            "abandoned": self.abandoned(),
            "refusals": self.refusals(),
            "waited_ms": quantiles([one.wait_s * 1e3 for one in self.decisions if one.granted]),
            "preemptions": self.raw["engine"]["preemptions"],
            "cpu": self.cpu(),
            "left_afterwards": self.raw["left"],
            "rss_mb": self.raw["rss_mb"],
            "failed": self.raw["failed"],
            "failed_samples": self.raw["failed_samples"],
        }

    def _ttft(self, group: str) -> dict[str, Any]:
        all_ms = self.firsts_ms(group)
        worst = lower_quantile(all_ms, 0.99)
        return quantiles([ms for ms in all_ms if np.isfinite(ms)]) | {
            "p99_offered": None if worst is None or not np.isfinite(worst) else shorten(worst),
            "offered": len(all_ms),
        }


def _sums(some: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mappings added up, name by name."""
    found: Counter[str] = Counter()
    for counts in some:
        found.update(counts)
    return dict(found)


def quantiles(values: Sequence[float]) -> dict[str, float | int | None]:
    """p50, p95 and p99 with the number of samples behind them."""
    found = {name: lower_quantile(values, q) for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
    return {name: None if value is None else shorten(value) for name, value in found.items()} | {"n": len(values)}


def shares(tokens: Mapping[str, float]) -> dict[str, float] | None:
    """Each one's part of the sum; None of nothing."""
    whole = sum(tokens.values())
    return {name: shorten(part / whole) for name, part in tokens.items()} if whole else None
