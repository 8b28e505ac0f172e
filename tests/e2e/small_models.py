"""Small models that tests make of `tiny` or of random weights, in a folder of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.engine.tiny_model import CONFIG, FOLDER, WEIGHTS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LABELS = ("calm", "busy", "full")


def write_classifier(folder: Path, labels: Sequence[str] = LABELS, seed: int = 0) -> NDArray[np.float32]:
    """The built-in model with a random matrix to classes in place of its words; returns the matrix."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    shutil.copytree(FOLDER, folder)
    head = np.random.default_rng(seed).normal(size=(len(labels), CONFIG["hidden_size"])).astype(np.float32)
    weights = load_file(folder / WEIGHTS)
    del weights["lm_head.weight"]
    save_file(weights | {"score.weight": head}, folder / WEIGHTS, metadata={"format": "pt"})
    classes = {"id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}}
    config = {**CONFIG, "architectures": ["LlamaForSequenceClassification"], "num_labels": len(labels), **classes}
    (folder / "config.json").write_text(json.dumps(config))
    return head
