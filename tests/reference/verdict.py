"""What the outcomes of vLLM's tests mean by `reference.yaml`: which are excepted, and what is wrong. Pure.

Invariant: a test of vLLM's passes, or fails for a reason that is written down, or the run fails; and each reason that
is written down is one that applied in this run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

PLAN = Path(__file__).with_name("reference.yaml")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one test, by its path below `tests/entrypoints` and its name; the message is the end of its error."""

    test: str
    outcome: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`reference.yaml`. Tests and files are patterns, with `*` for anything."""

    version: str
    sha256: str
    models: Mapping[str, str]  # the file's path below tests/entrypoints, to the model of ours that it gets
    left_out: Mapping[str, str]  # files with servers that do not run, to the reason
    fails: Mapping[str, str]  # tests that fail, to the reason
    may_fail: Mapping[str, str]  # tests that fail in some runs

    @classmethod
    def read(cls, path: Path = PLAN) -> Plan:
        given = yaml.safe_load(path.read_text())
        models = {file: model for model, files in given["run"].items() for file in files}
        tables = {name: _by_entry(given[name]) for name in ("left_out", "fails", "may_fail")}
        return cls(given["version"], given["sha256"], models, **tables)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Counts of tests, and complaints; the run is as planned where there are none."""

    passed: int
    excepted: int
    failed: int
    complaints: Sequence[str]


def judge(plan: Plan, outcomes: Iterable[Outcome]) -> Verdict:
    """Compare the outcomes with the plan's exceptions. A skipped test is one that did not pass."""
    worst: dict[str, Outcome] = {}
    for outcome in outcomes:  # a test that passed may still fail when its fixtures are taken down
        if outcome.test not in worst or outcome.outcome != "passed":
            worst[outcome.test] = outcome
    good = {test for test, outcome in worst.items() if outcome.outcome == "passed"}
    bad = worst.keys() - good
    excepted = {test for test in bad if _matches(plan.fails, test) or _matches(plan.may_fail, test)}
    complaints = [f"{test} {worst[test].outcome}: {worst[test].message}" for test in sorted(bad - excepted)]
    complaints += [f"{test} passes, and is listed as failing" for test in sorted(good) if _matches(plan.fails, test)]
    complaints += [f"no test is {pattern}" for pattern in _unused(plan.fails | plan.may_fail, worst)]
    return Verdict(len(good), len(excepted), len(bad - excepted), complaints)


def unclassified(plan: Plan, files: Sequence[str]) -> list[str]:
    """Complaints about files of vLLM's tests that neither run nor are left out, and about entries without a file."""
    found = [
        f"{file}: neither run nor left out"
        for file in files
        if not (_matches(plan.left_out, file) or file in plan.models)
    ]
    return found + [f"no file is {pattern}" for pattern in _unused(plan.left_out, files)]


def _by_entry(groups: Sequence[Mapping[str, object]] | None) -> dict[str, str]:
    """Each entry of a list of groups, `{why: a reason, which: [entries]}`, with its reason."""
    found: dict[str, str] = {}
    for group in groups or ():
        for entry in group["which"]:
            if entry in found:
                raise ValueError(f"reference.yaml: {entry} is listed twice")
            found[entry] = group["why"]
    return found


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(_fits(pattern, name) for pattern in patterns)


def _unused(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    return [pattern for pattern in patterns if not any(_fits(pattern, name) for name in names)]


def _fits(pattern: str, name: str) -> bool:
    """A test's name without its parameters stands for all of them."""
    expression = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(expression + r"(\[.*\])?", name) is not None
