"""A machine that is not here, by its name: `4xL4` is a node with four L4, `2x4xL4` are two such nodes.

Invariant: a device has the memory that NVML reports of it, which is less or more than the number in its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.cli.check.fit import Cluster, Node
from serve_app.errors import ConfigError
from serve_app.settings import GB, QuotaSettings, nearest

MIB = 2**20
MAX_NODES = 1000  # a mistake above that, and each is an object here

# NVML's total in MiB, as nvidia-smi shows it.
GPU_MIB: Mapping[str, int] = {
    "T4": 15_360,
    "V100-16GB": 16_384,
    "V100-32GB": 32_768,
    "RTX3090": 24_576,
    "RTX4090": 24_564,
    "RTX5090": 32_607,
    "A10": 23_028,
    "A10G": 23_028,
    "L4": 23_034,
    "A40": 46_068,
    "A6000": 49_140,
    "RTX6000-Ada": 49_140,
    "L40": 46_068,
    "L40S": 46_068,
    "A100-40GB": 40_960,
    "A100-80GB": 81_920,
    "H100": 81_559,
    "H20": 97_871,
    "GH200": 97_871,
    "RTX-PRO-6000": 97_887,
    "H200": 143_771,
    "B200": 183_359,
}
# Ray's names of the types, which `accelerator_type` has, where they are others.
RAY_NAMES: Mapping[str, tuple[str, ...]] = {
    "A100-40GB": ("A100", "A100-40G"),
    "A100-80GB": ("A100", "A100-80G"),
    "V100-16GB": ("V100",),
    "V100-32GB": ("V100",),
    "A6000": ("A6000", "RTX-A6000"),
}
_MACHINE = re.compile(r"(?:([1-9]\d{0,3})x)?([1-9]\d?)x([A-Za-z][\w-]*)")


@dataclass(frozen=True, slots=True)
class AssumedNode:
    """Nodes of one kind: their number, and the GPUs of each."""

    count: int
    gpus: int
    kind: str


def assumed_nodes(texts: Sequence[str]) -> tuple[AssumedNode, ...]:
    """What `4xL4` or `2x4xL4` stands for.

    Raises:
        ConfigError: another form, or a GPU that is not in the table.
    """
    return tuple(_nodes(text) for text in texts)


def assumed_cluster(nodes: Sequence[AssumedNode], quota: QuotaSettings) -> Cluster:
    """The nodes as a cluster to check against. CPUs are not compared: the name does not say how many there are."""
    found = []
    for node in nodes:
        whole = GPU_MIB[node.kind] * MIB if quota.device_gb is None else round(quota.device_gb * GB)
        kinds = RAY_NAMES.get(node.kind, (node.kind,))
        devices = (whole - round(quota.reserved_gb * GB),) * node.gpus
        found += [Node(math.inf, float(node.gpus), devices, kinds)] * node.count
    return Cluster(tuple(found))


def _nodes(text: str) -> AssumedNode:
    match = _MACHINE.fullmatch(text.strip())
    if match is None or int(match[1] or 1) > MAX_NODES:
        raise ConfigError(
            f"--assume {text}: write the GPUs of a node, 4xL4, or nodes and their GPUs, 2x4xL4", param="assume"
        )
    known = {name.lower(): name for name in GPU_MIB}
    kind = known.get(match[3].lower())
    if kind is None:
        near = nearest(match[3].lower(), known)
        hint = f"did you mean {known[near]}?" if near else f"known are {', '.join(GPU_MIB)}"
        raise ConfigError(f"--assume {text}: {match[3]} is not in the table of GPUs; {hint}", param="assume")
    return AssumedNode(int(match[1] or 1), int(match[2]), kind)
