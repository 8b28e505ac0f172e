"""The files of a model folder that a training writes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from scripts.tiny.network import Network
from serve_app.engine.tiny_model import FOLDER, WEIGHTS, rounded

TOKENIZER = "tokenizer.json"
MODE = 0o644  # engines may run as another user


def prepare(folder: Path, tokenizer: Tokenizer) -> None:
    """The tokenizer, and the files that no training changes if the folder is not the package's own."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER))
    for file in FOLDER.iterdir():
        if folder.resolve() != FOLDER and file.name not in (TOKENIZER, WEIGHTS):
            shutil.copyfile(file, folder / file.name)


def round_weights(network: Network) -> None:
    """Rounds every weight to what all three number formats hold."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.from_numpy(rounded(parameter.numpy())))


def save(network: Network, folder: Path, facts: Mapping[str, str]) -> None:
    """Writes the weights, rounded, with facts about the training in their header."""
    made = {name: torch.from_numpy(rounded(weight.numpy())) for name, weight in network.state_dict().items()}
    new = folder / f"{WEIGHTS}.new"
    save_file(made, new, metadata={"format": "pt", **facts})
    new.chmod(MODE)
    new.replace(folder / WEIGHTS)
    (folder / TOKENIZER).chmod(MODE)
