"""The built-in model with its layers repeated: an engine whose steps take longer beside the same work around it.

A step of the built-in model takes 1.5 ms on a fast core, so that relaying its tokens fills another core. With each
layer repeated a step takes about that many times as long, as a larger model's would, and all else stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path

from safetensors.numpy import load_file, save_file

WEIGHTS = "model.safetensors"
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def deepened(folder: Path, times: int, root: Path) -> Path:
    """A folder below `root` with the model of `folder`, its layers repeated so many times; written if it is missing.
    Its name is the same for the same weights.

    Raises:
        ValueError: below one time.
    """
    if times < 1:
        raise ValueError(f"each layer {times} times")
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    into = root / f"deep-{digest[:12]}-x{times}"
    if into.exists():
        return into
    root.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=root)) / into.name
    shutil.copytree(folder, building)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = layers * times
    (building / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / WEIGHTS)
    for name in list(weights):
        found = LAYER.match(name)
        if found is not None:
            for copy in range(1, times):
                weights[LAYER.sub(f"model.layers.{int(found[1]) + copy * layers}.", name)] = weights[name]
    save_file(weights, building / WEIGHTS, metadata={"format": "pt"})
    building.rename(into)  # whole or not at all
    building.parent.rmdir()
    return into
