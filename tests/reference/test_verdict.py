"""What counts as a failure of vLLM's tests against our endpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.reference.verdict import Outcome, Plan, judge, unclassified

PLAN = Plan("1.0", "00", {"a/test_a.py": "tiny"}, {"b/*": "no such route"}, {"a/test_a.py::test_x": "noise"}, {})
FAILS = Outcome("a/test_a.py::test_x[tiny-1]", "failed", "AssertionError")
PASSES = Outcome("a/test_a.py::test_y", "passed", "")


def test_a_failure_with_a_reason_is_excepted() -> None:
    verdict = judge(PLAN, [FAILS, PASSES])
    assert (verdict.passed, verdict.excepted, verdict.failed, list(verdict.complaints)) == (1, 1, 0, [])


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_test_that_does_not_pass_and_has_no_reason_fails_the_run(outcome: str) -> None:
    verdict = judge(PLAN, [FAILS, dataclasses.replace(PASSES, outcome=outcome, message="boom")])
    assert verdict.failed == 1
    assert verdict.complaints == [f"a/test_a.py::test_y {outcome}: boom"]


def test_a_test_that_fails_when_it_is_taken_down_has_failed() -> None:
    assert judge(PLAN, [FAILS, PASSES, dataclasses.replace(PASSES, outcome="failed")]).failed == 1


def test_a_reason_for_a_test_that_passes_is_stale() -> None:
    verdict = judge(PLAN, [dataclasses.replace(FAILS, outcome="passed")])
    assert verdict.complaints == ["a/test_a.py::test_x[tiny-1] passes, and is listed as failing"]


def test_a_reason_for_a_test_that_is_gone_is_stale() -> None:
    assert judge(PLAN, [PASSES]).complaints == ["no test is a/test_a.py::test_x"]


def test_a_test_that_may_fail_may_pass_but_has_to_be_there() -> None:
    plan = dataclasses.replace(PLAN, fails={}, may_fail=PLAN.fails)
    for outcome in ("failed", "passed"):
        assert not judge(plan, [dataclasses.replace(FAILS, outcome=outcome)]).complaints
    assert judge(plan, [PASSES]).complaints == ["no test is a/test_a.py::test_x"]


def test_parameters_in_a_pattern_are_compared_literally() -> None:
    plan = dataclasses.replace(PLAN, fails={"a/*[*lora]": "no adapters"})
    assert judge(plan, [dataclasses.replace(FAILS, test="a/test_a.py::test_z[x-lora]")]).failed == 0
    assert judge(plan, [dataclasses.replace(FAILS, test="a/test_a.py::test_z[l]")]).failed == 1


def test_a_new_file_of_vllms_has_to_run_or_be_left_out_with_a_reason() -> None:
    assert unclassified(PLAN, ["a/test_a.py", "b/test_b.py"]) == []
    assert unclassified(PLAN, ["a/test_a.py", "b/c.py", "c/test_c.py"]) == ["c/test_c.py: neither run nor left out"]
    assert unclassified(PLAN, ["a/test_a.py"]) == ["no file is b/*"]


def test_a_test_is_listed_once(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    group = "[{why: x, which: [t]}, {why: y, which: [t]}]"
    file.write_text(f"{{version: '1', sha256: '0', run: {{}}, left_out: [], fails: {group}, may_fail: []}}")
    with pytest.raises(ValueError, match="t is listed twice"):
        Plan.read(file)
