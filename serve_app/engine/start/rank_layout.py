"""The nodes of an engine's ranks: checked before the engine starts and while it runs.

Ray keeps the tensor-parallel groups together by the shape of the bundles (`engine_args.placement`). This is a second
check: an operator can change a deployment's bundles in Serve's own configuration, and the process that built the
application may have another build of vLLM than the nodes. Such a replica ends with the reason instead of starting slow
or wrong.

Invariant: an engine starts only if each of its tensor-parallel groups is on one node and has a GPU for each rank, if
the engine uses GPUs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util import get_current_placement_group, placement_group_table

from serve_app.core.times import RANK_NODES_S
from serve_app.engine.start.engine_args import placement
from serve_app.engine.start.environment import Platform
from serve_app.errors import ConfigError, EngineFailed
from serve_app.settings import ModelSettings

logger = logging.getLogger("ray.serve")


Group = Mapping[str, Any]  # an entry of Ray's placement group table
NO_GROUP: Group = {"bundles": {}, "bundles_to_node_id": {}}


class RankLayout:
    """The node of each bundle of an engine, in the order of the bundles.

    Args:
        nodes: node ids; empty outside Ray.
        read: returns Ray's present entry of the placement group.
    """

    def __init__(self, nodes: Sequence[str], read: Callable[[], Group]) -> None:
        self.nodes = tuple(nodes)
        self._read = read
        self._reading: asyncio.Task[Group] | None = None

    async def check(self) -> None:
        """Raise if a node with a part of this engine is gone. The replica's own node needs no check: the replica would
        be gone with it. If Ray does not answer, the nodes count as present.

        Raises:
            EngineFailed: names the node.
        """
        if len(set(self.nodes)) < 2:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(asyncio.to_thread(self._read))
        done, _ = await asyncio.wait({self._reading}, timeout=RANK_NODES_S)
        if not done or self._reading.exception() is not None:
            nodes = ", ".join(self.nodes)
            logger.warning("Ray does not report where the engine on nodes %s runs; a lost node is not seen now", nodes)
            return
        now = nodes_of(self._reading.result())
        if now != self.nodes:
            gone = next((node for node in self.nodes if node not in now), self.nodes[-1])
            raise EngineFailed(f"node {gone}, which held a part of this engine, is lost")


def layout_of_this_replica(settings: ModelSettings, platform: Platform) -> RankLayout:
    """The layout of this process's replica; without nodes if this process is not a replica or needs no bundles.

    Raises:
        ConfigError: the bundles do not match the engine's needs.
    """
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return RankLayout((), dict)
    group = get_current_placement_group()

    def read() -> Group:
        return NO_GROUP if group is None else dict(placement_group_table(group))

    given = read()
    verify(settings, platform, given)
    return RankLayout(nodes_of(given), read)


def nodes_of(group: Group) -> tuple[str, ...]:
    """The node of each bundle; an empty string for one without a node."""
    by_bundle = group.get("bundles_to_node_id", {})
    return tuple(by_bundle[index] for index in sorted(by_bundle))


def verify(settings: ModelSettings, platform: Platform, group: Group) -> None:
    """Check that the group has the bundles this model needs and that no tensor-parallel group is split.

    Raises:
        ConfigError: names the difference.
    """
    wanted = placement(settings, platform)
    bundles = wanted.get("placement_group_bundles", [])
    gpus = [float(group["bundles"][index].get("GPU", 0)) for index in sorted(group["bundles"])]
    needed = [float(bundle.get("GPU", 0)) for bundle in bundles]
    if gpus != needed:
        hint = "; was it built where vLLM's CPU build is installed?" if sum(gpus) < sum(needed) else ""
        raise ConfigError(
            f"the replica of {settings.name} got bundles of {_list(gpus)} GPUs, it needs {_list(needed)}{hint}",
            param="placement_group_bundles",
        )
    nodes = set(nodes_of(group))
    if wanted.get("placement_group_strategy") == "STRICT_PACK" and len(nodes) > 1:
        raise ConfigError(
            f"the tensor-parallel group of {settings.name} is split over {len(nodes)} nodes: "
            "its placement_group_strategy has to be STRICT_PACK",
            param="placement_group_strategy",
        )


def _list(amounts: Sequence[float]) -> str:
    return " + ".join(f"{amount:g}" for amount in amounts) or "no"
