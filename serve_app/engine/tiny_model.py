"""The built-in model `tiny`: a small Llama that comes with the package, for machines that have no weights to load.

`scripts.tiny` of the repository trains it. It answers questions about serve-app, calls tools and writes JSON, and says
that it is tiny where it knows nothing. Its folder is an ordinary model folder (safetensors, byte-level BPE tokenizer,
chat template with tools), so the whole stack runs on it the way it runs on a real one.

Invariant: every weight is exact in float32, float16 and bfloat16 alike, so that `dtype` changes arithmetic only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FOLDER = Path(str(resources.files("serve_app.engine") / "tiny"))
WEIGHTS = "model.safetensors"
CONFIG: Mapping[str, Any] = json.loads((FOLDER / "config.json").read_bytes())
VOCAB_SIZE: int = CONFIG["vocab_size"]  # small enough for an embedding of 0.4M parameters, large enough for whole words
LAYERS: int = CONFIG["num_hidden_layers"]
KV_HEADS: int = CONFIG["num_key_value_heads"]  # grouped-query attention, as in the models it stands for
HEAD_SIZE: int = CONFIG["head_dim"]  # the smallest that every vLLM attention backend takes

CONTROL_TOKENS = ("<|pad|>", "<|turn|>", "<|end|>")
TOOL_CALL_TAGS = ("<tool_call>", "</tool_call>")  # vLLM's `hermes` tool parser looks for them in the text

# Common words, for prompts.
WORDS = tuple((resources.files("serve_app.engine") / "tiny_words.txt").read_text().split())


def default_root() -> Path:
    """`$XDG_CACHE_HOME/serve-app/models`, else `~/.cache/serve-app/models`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "serve-app" / "models"


def ensure_tiny_model(root: Path | None = None, *, seed: int = 0) -> Path:
    """The folder of the built-in model; or, with a seed, of another model that is made of it.

    The other model has the same tokenizer and configuration. A hash of the seed has disturbed its weights: the same
    bytes on every machine, and text that makes no sense. Tests and benchmarks use it where a second model is wanted.

    Args:
        root: folder that holds the other models; `default_root()` if None.
        seed: 0 is the built-in model.

    Raises:
        OSError: the folder of another model cannot be written.
    """
    if seed == 0:
        return FOLDER
    root = default_root() if root is None else root
    digest = hashlib.sha256((FOLDER / WEIGHTS).read_bytes()).hexdigest()[:12]
    target = root / f"tiny-{digest}-{seed}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=root) as building:
        made = Path(building) / target.name
        _write_disturbed(made, seed)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise  # else another process was faster: its folder has the same bytes
    return target


def _write_disturbed(folder: Path, seed: int) -> None:
    from safetensors.numpy import load_file, save_file

    folder.mkdir()
    for file in FOLDER.iterdir():
        shutil.copyfile(file, folder / file.name)
    weights = load_file(folder / WEIGHTS)
    disturbed = {name: _disturbed(name, weight, seed) for name, weight in weights.items()}
    save_file(disturbed, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors writes 0600; engines may run as another user


def _disturbed(name: str, weight: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """A matrix with each number times another one between 0 and 2, rounded to what bfloat16 and float16 can hold."""
    import numpy as np

    if weight.ndim == 1:
        return weight
    # A hash's own stream, not a library's generator: the same bytes on every machine and version.
    drawn = hashlib.shake_256(f"tiny {seed} {name}".encode()).digest(weight.size)
    factors = np.frombuffer(drawn, dtype=np.uint8).reshape(weight.shape).astype(np.float32) / np.float32(128)
    return rounded(weight * factors)


def rounded(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest numbers that float32, float16 and bfloat16 hold alike; 0 for those below float16's normal range."""
    import numpy as np

    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)  # round half to even, as the hardware does
    kept = ((bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.abs(kept) < np.float32(2.0**-14), np.float32(0), kept)
