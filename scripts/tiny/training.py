"""The training: batches in, weights out. Muon for the matrices of the layers, AdamW for all else.

Each core has a process of its own, which computes the gradient of its rows of a batch; the sum is what both go by. So
the cores wait for each other once a step, and not in each operation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed
from torch import Tensor

from scripts.tiny.network import Network, rotations
from scripts.tiny.samples import LONG_WINDOW, MAX_TOKENS, Sample
from scripts.tiny.start import give_copying

MICRO_TOKENS = 3072  # of a part of a batch: its activations stay near the cores
LENGTH_STEP = 32  # rows of a part are as long as its longest, rounded up
WARM_UP = 20  # steps
DECAY_FROM = 0.45  # of the steps: from there the rates fall to zero
MATRIX_RATE = 0.02
TABLE_RATE = 0.004  # of embedding, head and norms
MOMENTUM = 0.95
DECAY = 0.01
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5  # Jordan et al., Muon, 2024
LONGEST = LONG_WINDOW + MAX_TOKENS


class Muon:
    """Momentum whose update is made orthogonal (Jordan et al., Muon, 2024), in float32: torch's own needs bfloat16."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._matrices = matrices
        self._momenta = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
            if matrix.grad is None:
                raise RuntimeError("a matrix has no gradient")
            momentum.lerp_(matrix.grad, 1 - MOMENTUM)
            update = orthogonal(matrix.grad.lerp(momentum, MOMENTUM))
            rows, columns = matrix.shape
            matrix.mul_(1 - rate * DECAY).add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """A matrix with the same singular vectors and singular values near one."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    found = wide / (wide.norm() + 1e-7)
    for first, second, third in NEWTON_SCHULZ:
        gram = found @ found.T
        found = first * found + (second * gram + third * gram @ gram) @ found
    return cast(Tensor, found.T if matrix.shape[0] > matrix.shape[1] else found)


def parts(batch: Sequence[Sample]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and weights of rows that are sorted by their length, [rows, length], in parts of similar length."""
    waiting = list[Sample]()
    for sample in [*batch, None]:
        if waiting and (sample is None or (len(waiting) + 1) * len(sample.tokens) > MICRO_TOKENS):
            length = -(-len(waiting[-1].tokens) // LENGTH_STEP) * LENGTH_STEP + 1
            rows = [(row.tokens, row.weights, length - len(row.tokens)) for row in waiting]
            yield (
                torch.tensor([tokens + [0] * lacking for tokens, _, lacking in rows]),
                torch.tensor([weights + [0.0] * lacking for _, weights, lacking in rows]),
            )
            waiting = []
        if sample is not None:
            waiting.append(sample)


class Progress(NamedTuple):
    """Where a run stands. `loss`: nats of a weighted token, of the last steps."""

    step: int
    steps: int
    tokens: int
    loss: float
    seconds: float


def summed(network: Network, loss: float) -> float:
    """Makes the gradients of all processes the same, their sum; that of the losses."""
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), torch.tensor([loss])])
    torch.distributed.all_reduce(flat)
    parts_of_sum = torch.split(flat[:-1], [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts_of_sum, strict=True):
        gradient.copy_(part.view_as(gradient))
    return float(flat[-1])


def rate_at(step: int, steps: int) -> float:
    """The part of the full rates at a step: up, level, and down to zero."""
    left = (steps - step) / (steps * (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARM_UP, left)


def train(
    batches: Iterator[list[Sample]],
    *,
    seed: int,
    steps: int,
    report: Callable[[Network, Progress], None],
    rank: int = 0,
    ranks: int = 1,
) -> Network:
    """A network after so many batches. `report` is called after each of them.

    Args:
        rank: of this process, of `ranks` that have joined torch's process group; all get the same batches.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    network = Network()
    give_copying(network)
    matrices = [parameter for name, parameter in network.named_parameters() if "layers" in name and parameter.ndim == 2]
    held = {id(matrix) for matrix in matrices}
    tables = [parameter for parameter in network.parameters() if id(parameter) not in held]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(tables, betas=(0.9, 0.95), weight_decay=DECAY, fused=True)
    cosines, sines = rotations(LONGEST)
    started = time.monotonic()
    mean = 0.0
    tokens = 0
    for step in range(steps):
        batch = next(batches)
        weight = sum(sum(sample.weights[1:]) for sample in batch)
        loss = 0.0
        rows = sorted(batch, key=lambda sample: len(sample.tokens))
        for part, weights in parts(rows[rank::ranks]):
            part_loss = network.loss(part, weights, cosines, sines) / weight
            part_loss.backward()  # type: ignore[no-untyped-call]
            loss += float(part_loss.detach())
        if ranks > 1:
            loss = summed(network, loss)
        rate = rate_at(step, steps)
        for group in adam.param_groups:
            group["lr"] = TABLE_RATE * rate
        torch.nn.utils.clip_grad_norm_(tables, 1.0)
        adam.step()
        muon.step(MATRIX_RATE * rate)
        network.zero_grad(set_to_none=True)
        tokens += sum(len(sample.tokens) for sample in batch)
        mean += (loss - mean) / min(step + 1, 50)
        report(network, Progress(step + 1, steps, tokens, mean, time.monotonic() - started))
    return network


@torch.no_grad()
def loss_of(network: Network, samples: Sequence[Sample]) -> float:
    """The mean loss of a token with full weight, in nats."""
    cosines, sines = rotations(LONGEST)
    total = 0.0
    count = 0.0
    for part, weights in parts(sorted(samples, key=lambda sample: len(sample.tokens))):
        full = (weights >= 1).float()
        total += float(network.loss(part, full, cosines, sines))
        count += float(full[:, 1:].sum())
    return total / count
