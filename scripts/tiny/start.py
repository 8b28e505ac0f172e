"""Weights to begin with that can already copy: heads that look one token back, and heads that look for the same token.

A head that knows what followed the last occurrence of the present token (Elhage et al., A mathematical framework for
transformer circuits, 2021) takes a model of random weights most of its training to find. Here it is given, roughly: in
the first layer a head writes the token before into a part of the hidden state, in the next two a head compares the
present token with that part, and adds what it finds there to the answer. The training does the rest.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from scripts.tiny.network import (
    EMBEDDING_DEVIATION,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MATRIX_DEVIATION,
    Network,
)
from serve_app.engine.tiny_model import CONFIG

CONSTANT = 0.3  # a dimension of every embedding that is the same: what does not depend on the token reads it
NOISE = 0.02  # deviation of the rest of the rows that are given
BACK_GAIN = 1.72  # the neighbours of the token before get a twentieth of its attention
BACK_PAIRS = 6  # of the rotary embedding, the fastest: they tell one position from the next
MATCH_GAIN = 2.2  # equal tokens stand above two hundred others
MATCH_FROM = 8  # the pairs from here on turn by less than a radian in a hundred tokens
WRITTEN = 0.1  # scale of what the first layer writes, as of an embedding
FOUND = 0.3  # scale of what the others write
GROUP = HEADS // KV_HEADS
HALF = HEAD_SIZE // 2
GIVEN = 2  # key heads of a layer that are given; the others are random


def basis(rows: int) -> Tensor:
    """Orthonormal rows, [rows, hidden size]."""
    return cast(Tensor, torch.linalg.qr(torch.randn(HIDDEN, HIDDEN)).Q[:rows])


@torch.no_grad()
def give_copying(network: Network) -> None:
    """Sets the weights of some heads, of the embedding and of the output; the others stay random."""
    turned = basis(HIDDEN)
    embedding = network.model.embed_tokens.weight
    network.lm_head.weight.copy_(embedding @ turned.T * (MATRIX_DEVIATION / EMBEDDING_DEVIATION))
    embedding[:, 0] = CONSTANT
    read = [basis(HEAD_SIZE) for _ in range(GIVEN)]
    written = torch.split(basis(GIVEN * GROUP * HEAD_SIZE), HEAD_SIZE)
    layers: Any = network.model.layers
    for head in range(GIVEN):
        _look_back(layers[0].self_attn, head, read[head], written[head * GROUP : (head + 1) * GROUP])
    carried = torch.split(basis(2 * GIVEN * HEAD_SIZE), HEAD_SIZE)
    for layer in (1, 2):
        for head in range(GIVEN):
            values = carried[(layer - 1) * GIVEN + head]
            _look_for(layers[layer].self_attn, head, read[head], written[head * GROUP], values, turned @ values.T)


def _rows(weight: Tensor, head: int) -> Tensor:
    return weight[head * HEAD_SIZE : (head + 1) * HEAD_SIZE]


def _look_back(attention: Any, head: int, read: Tensor, written: tuple[Tensor, ...]) -> None:
    """The heads of one key head look one, two, ... tokens back, whatever these are."""
    speeds = CONFIG["rope_theta"] ** (-torch.arange(BACK_PAIRS) / HALF)
    keys = _rows(attention.k_proj.weight, head)
    keys.normal_(std=NOISE)
    keys[:BACK_PAIRS, 0] = BACK_GAIN
    _rows(attention.v_proj.weight, head).copy_(read)
    for place, target in enumerate(written):
        query_head = head * GROUP + place
        queries = _rows(attention.q_proj.weight, query_head)
        queries.normal_(std=NOISE)
        queries[:BACK_PAIRS, 0] = BACK_GAIN * torch.cos((place + 1) * speeds)
        queries[HALF : HALF + BACK_PAIRS, 0] = -BACK_GAIN * torch.sin((place + 1) * speeds)
        _rows(attention.o_proj.weight.T, query_head).copy_(WRITTEN * target)


def _look_for(attention: Any, head: int, read: Tensor, written: Tensor, values: Tensor, output: Tensor) -> None:
    """The heads of one key head look for places whose token before is the present one."""
    pairs = HALF - MATCH_FROM
    mixed = torch.linalg.qr(torch.randn(HEAD_SIZE, 2 * pairs)).Q.T
    slow = [*range(MATCH_FROM, HALF), *range(HALF + MATCH_FROM, HEAD_SIZE)]
    keys = _rows(attention.k_proj.weight, head)
    keys.normal_(std=NOISE)
    keys[slow] = MATCH_GAIN * mixed @ written
    _rows(attention.v_proj.weight, head).copy_(values)
    for query_head in range(head * GROUP, (head + 1) * GROUP):
        queries = _rows(attention.q_proj.weight, query_head)
        queries.normal_(std=NOISE)
        queries[slow] = MATCH_GAIN * mixed @ read
        _rows(attention.o_proj.weight.T, query_head).copy_(FOUND / GROUP * output.T)
