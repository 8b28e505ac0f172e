"""Models with the widths and vocabularies of real ones, and few layers, with random weights: written to a folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL = 8  # entries of a vocabulary that are no text
ASCII = range(33, 127)
FURTHER = 0x4E00  # the first of the other characters of the alphabet
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and how it is run. `kind`: the class of its configuration in `transformers`, without `Config`."""

    name: str
    kind: str
    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    stored: str
    dtype: str
    tied: bool
    sequences: int
    step_tokens: int
    length: int = 8192
    eager: bool = True


SHAPES = (
    Shape("tiny", "Llama", 2048, 192, 512, 4, 8, 4, 32, "float32", "float32", False, 64, 2048),
    Shape("compiled", "Llama", 2048, 192, 512, 4, 8, 4, 32, "float32", "float32", False, 64, 2048, eager=False),
    Shape("large vocabulary", "Gemma3Text", 262_144, 640, 2048, 4, 4, 1, 256, "bfloat16", "float32", True, 8, 2048),
    Shape("the same, bfloat16", "Gemma3Text", 262_144, 640, 2048, 4, 4, 1, 256, "bfloat16", "bfloat16", True, 8, 2048),
    Shape("many sequences", "Qwen3", 151_936, 1024, 3072, 4, 16, 8, 128, "bfloat16", "bfloat16", True, 128, 2048),
    Shape("long steps", "Llama", 2048, 1024, 4096, 2, 16, 8, 64, "float32", "float32", False, 16, 16_384, 20_000),
    Shape("wide", "Llama", 128_256, 4096, 14_336, 1, 32, 8, 128, "bfloat16", "bfloat16", False, 16, 8192, 9000),
    Shape("wide, float32", "Llama", 32_000, 4096, 14_336, 2, 32, 8, 128, "bfloat16", "float32", False, 16, 2048, 3000),
)


def write(shape: Shape, folder: Path) -> None:
    """The model's folder, as Hugging Face's tools write one."""
    import torch
    import transformers

    kind = getattr(transformers, f"{shape.kind}Config")
    config = kind(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=max(32_768, shape.length),
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=shape.vocabulary - SPECIAL,
        pad_token_id=None,
    )
    torch.set_default_dtype(getattr(torch, shape.stored))
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    write_tokenizer(shape.vocabulary, folder)


def write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Byte-pair encoding with as many merges as entries, as real ones have: they are most of a tokenizer's memory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    count = math.isqrt(vocabulary - 2 * SPECIAL)
    letters = [*map(chr, ASCII), *(chr(FURTHER + index) for index in range(count))][:count]
    pairs = [(first, second) for first in letters for second in letters][: vocabulary - SPECIAL - count]
    entries = {text: index for index, text in enumerate([*letters, *(first + second for first, second in pairs)])}
    tokenizer: Any = Tokenizer(models.BPE(vocab=entries, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|end|>", "<|pad|>"])
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
