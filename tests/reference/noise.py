"""The built-in model's folder with weights of chance: an answer is noise, of a length that the weights decide."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from serve_app.engine import ensure_tiny_model

WEIGHTS = "model.safetensors"
HEAD = "lm_head.weight"
# The scale of a matrix's numbers, as the exponent of a power of two, by what is in its name. They deviate by 147 times
# that, so that 192 inputs have a gain of about one.
LOG2_SCALES = {"embed_tokens": -8, "q_proj": -10, "k_proj": -10, "lm_head": -9}
LOG2_SCALE = -11
# of the row of a token in the head: an end is half as likely, stray bytes and tags hardly ever come, quotes often
END_SCALE = 0.5
UNREADABLE_SCALE = 0.25
QUOTE_SCALE = 2.0


def noise_model(folder: Path) -> None:
    """Write the folder."""
    shutil.copytree(ensure_tiny_model(), folder)
    weights = {name: of_chance(name, weight.shape) for name, weight in load_file(folder / WEIGHTS).items()}
    for token, text in enumerate(texts(folder)):
        weights[HEAD][token] *= scale_of(text)
    weights[HEAD][json.loads((folder / "config.json").read_text())["eos_token_id"]] *= END_SCALE / UNREADABLE_SCALE
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def of_chance(name: str, shape: tuple[int, ...]) -> Any:
    """The same numbers on every machine; a norm is one."""
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    exponent = next((scale for part, scale in LOG2_SCALES.items() if part in name), LOG2_SCALE)
    drawn = hashlib.shake_256(f"tiny 0 {name}".encode()).digest(shape[0] * shape[1])
    odd = np.frombuffer(drawn, dtype=np.uint8).astype(np.float32) * 2 - 255
    return odd.reshape(shape) * np.float32(2.0**exponent)


def texts(folder: Path) -> list[str]:
    """What each token is alone; nothing of a special one."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return [str(tokenizer.decode([token], skip_special_tokens=True)) for token in range(len(tokenizer))]


def scale_of(text: str) -> float:
    readable = text.isascii() and text.replace("\n", "").isprintable()
    if not text or text.startswith(("<tool_call>", "</tool_call>")) or not readable:
        return UNREADABLE_SCALE
    return QUOTE_SCALE if text == '"' else 1.0
