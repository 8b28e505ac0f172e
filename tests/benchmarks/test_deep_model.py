"""The deeper model has every layer so many times, and the rest of the built-in one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.overload.deep_model import deepened
from serve_app.engine import ensure_tiny_model
from serve_app.engine.tiny_model import LAYERS


def test_each_layer_is_there_so_many_times_and_all_else_once(tmp_path: Path) -> None:
    tiny = ensure_tiny_model()
    deep = deepened(tiny, 3, tmp_path)
    assert deepened(tiny, 3, tmp_path) == deep
    assert json.loads((deep / "config.json").read_text())["num_hidden_layers"] == 3 * LAYERS
    before = load_file(tiny / "model.safetensors")
    after = load_file(deep / "model.safetensors")
    name = "model.layers.{}.mlp.down_proj.weight"
    for layer in range(3 * LAYERS):
        assert np.array_equal(after[name.format(layer)], before[name.format(layer % LAYERS)])
    of_layers = [one for one in before if one.startswith("model.layers.")]
    assert len(after) == len(before) + 2 * len(of_layers)
    assert {path.name for path in deep.iterdir()} == {path.name for path in tiny.iterdir()}


def test_less_than_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 times"):
        deepened(ensure_tiny_model(), 0, tmp_path)
