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
IMAGE_TOKEN = "<image>"  # in the text of a prompt, as vLLM writes it for LLaVA
IMAGE_SIDE = 32  # pixels of the square that the tower sees of any image
PATCH_SIDE = 8
IMAGE_TOKENS = (IMAGE_SIDE // PATCH_SIDE) ** 2  # of each image in the prompt
TOWER: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIDE,
    "patch_size": PATCH_SIDE,
    "projection_dim": 64,
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


def write_vision(folder: Path, seed: int = 0) -> Path:
    """The built-in model behind an image tower of random weights, as LLaVA 1.5 has it: CLIP, and a projector to the
    words' embeddings. The padding token, which no text has, stands for images; so texts are answered as by the built-in
    model. Its image processor is the one on Pillow, for there is no torchvision."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    shutil.copytree(FOLDER, folder)
    draw = np.random.default_rng(seed)
    weights = {f"language_model.{name}": weight for name, weight in load_file(folder / WEIGHTS).items()}
    for name, shape in _tower_shapes().items():
        scale = 1.0 / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 0.02
        weights[name] = (draw.normal(size=shape) * scale + _mean(name)).astype(np.float32)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    text = {name: value for name, value in CONFIG.items() if name not in ("architectures", "dtype")}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "float32",
        "text_config": text,
        "vision_config": TOWER,
        "image_token_index": CONFIG["pad_token_id"],
        "image_seq_length": IMAGE_TOKENS,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "eos_token_id": CONFIG["eos_token_id"],
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": PATCH_SIDE,
        "vision_feature_select_strategy": "default",
        "image_token": IMAGE_TOKEN,
        "num_additional_image_tokens": 1,
    }
    square = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    images = {"image_processor_type": "CLIPImageProcessor", "size": square, "crop_size": square}
    for name, document in (("config", config), ("processor_config", processor), ("preprocessor_config", images)):
        (folder / f"{name}.json").write_text(json.dumps(document))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        file.write_text(file.read_text().replace("<|pad|>", IMAGE_TOKEN))
    return folder


def _mean(name: str) -> float:
    """Of a weight: 1 for the factors of a norm."""
    *_, layer, part = name.split(".")
    return 1.0 if part == "weight" and "norm" in layer else 0.0


def _tower_shapes() -> dict[str, tuple[int, ...]]:
    """The weights of tower and projector, by their names in LLaVA's files."""
    size: int = TOWER["hidden_size"]
    inner: int = TOWER["intermediate_size"]
    words = CONFIG["hidden_size"]
    tower = "vision_tower.vision_model"
    found: dict[str, tuple[int, ...]] = {
        f"{tower}.embeddings.class_embedding": (size,),
        f"{tower}.embeddings.patch_embedding.weight": (size, 3, PATCH_SIDE, PATCH_SIDE),
        f"{tower}.embeddings.position_embedding.weight": (IMAGE_TOKENS + 1, size),
    }
    linear = {"multi_modal_projector.linear_1": (words, size), "multi_modal_projector.linear_2": (words, words)}
    norms = [f"{tower}.pre_layrnorm", f"{tower}.post_layernorm"]
    for layer in range(TOWER["num_hidden_layers"]):
        at = f"{tower}.encoder.layers.{layer}"
        linear |= {f"{at}.self_attn.{one}_proj": (size, size) for one in ("q", "k", "v", "out")}
        linear |= {f"{at}.mlp.fc1": (inner, size), f"{at}.mlp.fc2": (size, inner)}
        norms += [f"{at}.layer_norm1", f"{at}.layer_norm2"]
    found |= {f"{name}.weight": shape for name, shape in linear.items()}
    found |= {f"{name}.bias": shape[:1] for name, shape in linear.items()}
    return found | {f"{name}.{part}": (size,) for name in norms for part in ("weight", "bias")}
