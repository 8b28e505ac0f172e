"""The benchmark of memory estimates: its verdicts, and that a shape that does not start costs no other its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory_estimate import main as module
from benchmarks.memory_estimate.shapes import SHAPES, Shape

FOUND = {"weights_bytes": 10, "estimated_bytes": 120, "idle_bytes": 90, "measured_bytes": 100}
FOUND |= {"kept_bytes": 70, "recurring_bytes": 100}


@pytest.mark.parametrize(
    ("row", "met"),
    [
        ({"ratio": 1.0}, True),
        ({"ratio": 1.5, "again_ratio": 1.1}, True),
        ({"ratio": 0.99}, False),
        ({"ratio": 1.51}, False),
        ({"ratio": 1.2, "again_ratio": 0.89}, False),
        ({"failed": "it ended"}, False),
    ],
)
def test_the_bars(row: dict[str, Any], met: bool) -> None:
    assert module.met(row) is met


def test_a_shape_that_does_not_start_costs_no_other_its_figures(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def measure(shape: Shape, folder: Path) -> dict[str, Any]:
        if shape.name == "wide":
            raise module.NotStartedError("out of memory")
        return dict(FOUND)

    monkeypatch.setattr(module, "write", lambda shape, folder: None)
    monkeypatch.setattr(module, "measure", measure)
    module.main([])
    document = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert document["shapes"].keys() == {shape.name for shape in SHAPES}
    assert document["shapes"]["wide"] == {"failed": "out of memory"}
    assert document["shapes"]["tiny"] == {**FOUND, "ratio": 1.2, "again_bytes": 100, "again_ratio": 1.03}
    assert [name for name, met in document["met"].items() if not met] == ["wide"]
