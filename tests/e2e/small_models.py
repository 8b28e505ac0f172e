"""Small models that tests make of `tiny` or of random weights, in a folder of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.engine.tiny_model import CONFIG, FOLDER, WEIGHTS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LABELS = ("calm", "busy", "full")
CLIP_S = 2  # of audio, that the small Whisper reads at once; real ones read 30
_STATES_PER_S = 50  # of Whisper's encoder
IMAGE_SIDE = 32  # pixels of the square that the tower sees of any image
PATCH_SIDE = 8
SCALE = 2  # patches on a side that become one token
PATCHES = (IMAGE_SIDE // PATCH_SIDE) ** 2
IMAGE_TOKENS = PATCHES // SCALE**2  # of each image in the prompt, beside the marks around them
IMAGE_TOKEN = "<image>"  # in the text of a prompt, as vLLM writes it
EDGE_TOKEN = "<fake_token_around_image>"
IMAGE_TEXT = f"{EDGE_TOKEN}<global-img>{IMAGE_TOKEN * IMAGE_TOKENS}{EDGE_TOKEN}"  # what that becomes
ADDED_TOKENS = (EDGE_TOKEN, "<end_of_utterance>")  # the processor adds what its tokenizer lacks
THINK_TOKENS = ("<think>", "</think>")
THOUGHT_ENDS = 1.02  # times the logit of a comma: where one would come, the thought ends
TOWER: dict[str, Any] = {
    "model_type": "idefics3_vision",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIDE,
    "patch_size": PATCH_SIDE,
}


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


def write_vision(folder: Path, seed: int = 0) -> Path:
    """The built-in model behind an image tower of random weights, as Idefics 3 has it. The padding token, which no text
    has, stands for images; so texts are answered as by the built-in model. It needs no torchvision, as vLLM's LLaVA,
    Qwen-VL and Gemma 3 do."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    shutil.copytree(FOLDER, folder)
    draw = np.random.default_rng(seed)
    weights = {_named(name): weight for name, weight in load_file(folder / WEIGHTS).items()}
    for name in (EMBEDDINGS, HEAD):
        weights[name] = np.pad(weights[name], ((0, len(ADDED_TOKENS)), (0, 0)))
    for name, shape in _tower_shapes().items():
        scale = 1.0 / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 0.02
        weights[name] = (draw.normal(size=shape) * scale + _mean(name)).astype(np.float32)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    text = {name: value for name, value in CONFIG.items() if name not in ("architectures", "dtype")}
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "dtype": "float32",
        "text_config": text | {"vocab_size": CONFIG["vocab_size"] + len(ADDED_TOKENS)},
        "vision_config": TOWER,
        "image_token_id": CONFIG["pad_token_id"],
        "pad_token_id": CONFIG["pad_token_id"],
        "eos_token_id": CONFIG["eos_token_id"],
        "scale_factor": SCALE,
        "tie_word_embeddings": False,
    }
    side = {"longest_edge": IMAGE_SIDE}
    images = {"image_processor_type": "Idefics3ImageProcessor", "size": side, "max_image_size": side}
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS}
    documents = {"config": config, "processor_config": processor}
    documents["preprocessor_config"] = images | {"do_image_splitting": False}
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        file.write_text(file.read_text().replace("<|pad|>", IMAGE_TOKEN))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for number, token in enumerate(ADDED_TOKENS, CONFIG["vocab_size"]):
        tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": number, "content": token})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def write_thinking(folder: Path) -> Path:
    """The built-in model with a thought before each answer: its turns are opened with `<think>`, and where it would say
    a comma it says `</think>`. It still has its tags of tool calls, which `tiny-thinks` of tests/reference has not."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    shutil.copytree(FOLDER, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words: dict[str, int] = tokenizer["model"]["vocab"]
    first = CONFIG["vocab_size"]
    plain = tokenizer["added_tokens"][0] | {"special": False}
    tokenizer["added_tokens"] += [plain | {"id": first + at, "content": text} for at, text in enumerate(THINK_TOKENS)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = folder / "chat_template.jinja"
    opened = "<|turn|>assistant\\n"
    template.write_text(template.read_text().replace(opened, opened + THINK_TOKENS[0]))
    weights = load_file(folder / WEIGHTS)
    embeddings = weights["model.embed_tokens.weight"]
    head = weights[HEAD]
    line = words["\u010a"]  # "\n", as a tokenizer of bytes writes it
    comma = words[","]
    ended = head[comma] * np.float32(THOUGHT_ENDS)
    weights["model.embed_tokens.weight"] = np.concatenate([embeddings, embeddings[[line, comma]]])
    weights[HEAD] = np.concatenate([head, np.zeros_like(head[:1]), ended[None]])
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": first + len(THINK_TOKENS)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


EMBEDDINGS = "model.text_model.embed_tokens.weight"
HEAD = "lm_head.weight"


def _named(name: str) -> str:
    """A weight of the built-in model, as Idefics 3 names it."""
    return name if name == HEAD else name.replace("model.", "model.text_model.", 1)


def _mean(name: str) -> float:
    """Of a weight: 1 for the factors of a norm."""
    *_, layer, part = name.split(".")
    return 1.0 if part == "weight" and "norm" in layer else 0.0


def _tower_shapes() -> dict[str, tuple[int, ...]]:
    """The weights of the tower and of what connects it."""
    size: int = TOWER["hidden_size"]
    inner: int = TOWER["intermediate_size"]
    tower = "model.vision_model"
    found: dict[str, tuple[int, ...]] = {
        f"{tower}.embeddings.patch_embedding.weight": (size, 3, PATCH_SIDE, PATCH_SIDE),
        f"{tower}.embeddings.patch_embedding.bias": (size,),
        f"{tower}.embeddings.position_embedding.weight": (PATCHES, size),
        "model.connector.modality_projection.proj.weight": (CONFIG["hidden_size"], size * SCALE**2),
    }
    linear = dict[str, tuple[int, int]]()
    norms = [f"{tower}.post_layernorm"]
    for layer in range(TOWER["num_hidden_layers"]):
        at = f"{tower}.encoder.layers.{layer}"
        linear |= {f"{at}.self_attn.{one}_proj": (size, size) for one in ("q", "k", "v", "out")}
        linear |= {f"{at}.mlp.fc1": (inner, size), f"{at}.mlp.fc2": (size, inner)}
        norms += [f"{at}.layer_norm1", f"{at}.layer_norm2"]
    found |= {f"{name}.weight": shape for name, shape in linear.items()}
    found |= {f"{name}.bias": shape[:1] for name, shape in linear.items()}
    return found | {f"{name}.{part}": (size,) for name in norms for part in ("weight", "bias")}
