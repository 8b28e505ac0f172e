"""The Llama that is trained, with the names that its files have."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from serve_app.engine.tiny_model import CONFIG

HIDDEN: int = CONFIG["hidden_size"]
HEADS: int = CONFIG["num_attention_heads"]
KV_HEADS: int = CONFIG["num_key_value_heads"]
HEAD_SIZE: int = CONFIG["head_dim"]
MLP: int = CONFIG["intermediate_size"]
EPSILON: float = CONFIG["rms_norm_eps"]
EMBEDDING_DEVIATION = 0.1
MATRIX_DEVIATION = 0.05  # of 192 inputs: a gain of 0.7
OUTPUT_DEVIATION = 0.004  # of what a layer adds: at first it adds next to nothing


def rotations(length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, [length, head size]."""
    steps = torch.arange(0, HEAD_SIZE, 2, dtype=torch.float32) / HEAD_SIZE
    angles = torch.outer(torch.arange(length, dtype=torch.float32), CONFIG["rope_theta"] ** -steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def linear(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=MATRIX_DEVIATION)
    return made


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = linear(HIDDEN, HEADS * HEAD_SIZE)
        self.k_proj = linear(HIDDEN, KV_HEADS * HEAD_SIZE)
        self.v_proj = linear(HIDDEN, KV_HEADS * HEAD_SIZE)
        self.o_proj = linear(HEADS * HEAD_SIZE, HIDDEN)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        queries = self.q_proj(hidden).view(rows, length, HEADS, HEAD_SIZE).transpose(1, 2)
        keys = self.k_proj(hidden).view(rows, length, KV_HEADS, HEAD_SIZE).transpose(1, 2)
        values = self.v_proj(hidden).view(rows, length, KV_HEADS, HEAD_SIZE).transpose(1, 2)
        queries = rotated(queries, cosines, sines)
        keys = rotated(keys, cosines, sines)
        found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return cast(Tensor, self.o_proj(found.transpose(1, 2).reshape(rows, length, -1)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = linear(HIDDEN, MLP)
        self.up_proj = linear(HIDDEN, MLP)
        self.down_proj = linear(MLP, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPSILON)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPSILON)
        self.mlp = Mlp()

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosines, sines)
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class Body(nn.Module):
    """Tokens [rows, length] to hidden states [rows, length, hidden size]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=EMBEDDING_DEVIATION)
        self.layers = nn.ModuleList(Layer() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = nn.RMSNorm(HIDDEN, EPSILON)

    def forward(self, tokens: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, cosines, sines)
        return cast(Tensor, self.norm(hidden))


class Network(nn.Module):
    """The names of its parameters are those of the files of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        self.lm_head = linear(HIDDEN, CONFIG["vocab_size"])
        for layer in self.model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):  # type: ignore[union-attr]
                nn.init.normal_(part.weight, std=OUTPUT_DEVIATION)  # type: ignore[union-attr,arg-type]

    def loss(self, tokens: Tensor, weights: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """The weighted sum of the losses of tokens [rows, length]; `weights`: of each token as a target."""
        length = tokens.shape[1] - 1
        hidden = self.model(tokens[:, :-1], cosines[:length], sines[:length])
        asked = weights[:, 1:] > 0
        logits = self.lm_head(hidden[asked])
        losses = functional.cross_entropy(logits, tokens[:, 1:][asked], reduction="none")
        return (losses * weights[:, 1:][asked]).sum()
