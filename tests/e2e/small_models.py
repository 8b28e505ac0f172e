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
CLIP_S = 2  # of audio, that the small Whisper reads at once; real ones read 30
_STATES_PER_S = 50  # of Whisper's encoder


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


def write_whisper(folder: Path, seed: int = 0) -> None:
    """A Whisper of random weights that hears `CLIP_S` seconds at once, with the words of the built-in model."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    folder.mkdir(parents=True)
    tokens = _write_whisper_tokenizer(folder)
    end = tokens["<|endoftext|>"]
    config = WhisperConfig(
        vocab_size=len(tokens),
        num_mel_bins=80,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=CLIP_S * _STATES_PER_S,
        max_target_positions=128,
        init_std=0.3,  # with the usual 0.02 it would say one word again and again, whatever it hears
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=tokens["<|startoftranscript|>"],
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(seed)
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor"}
    sizes = {"feature_size": 80, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": CLIP_S, "n_fft": 400}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor | sizes))


def _write_whisper_tokenizer(folder: Path) -> dict[str, int]:
    """The built-in model's words and Whisper's marks, and their ids."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    tokenizer = json.loads((FOLDER / "tokenizer.json").read_bytes())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    first = len(vocabulary)
    marks = ["endoftext", "startoftranscript", *LANGUAGES, "translate", "transcribe", "startoflm", "startofprev"]
    marks += ["nospeech", "notimestamps"]
    times = [f"{step / _STATES_PER_S:.2f}" for step in range(CLIP_S * _STATES_PER_S + 1)]
    added = {f"<|{name}|>": first + number for number, name in enumerate([*marks, *times])}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] = [
        {"id": number, "content": text, "special": number < first + len(marks)} | plain
        for text, number in added.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    end = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "WhisperTokenizer"} | end))
    return vocabulary | added
