"""A Ray cluster of several nodes in one process tree, with GPUs that are only counted: `ray.cluster_utils.Cluster`.

Run as `python -m tests.cluster.placement_nodes FOLDER` with the environment of `placement_lab`; it reads one JSON
object a line (`do` and its arguments) and answers each with one: `{"answer": ...}` or `{"error": text}`. It ends with
its input.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import psutil
import ray
from ray import serve
from ray._private import services
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from autoscaling import operations
from autoscaling.operations import draining, ray_drains
from autoscaling.placement_hook import give_up_bundles
from autoscaling.rollout import declare
from serve_app.cluster.local import LOOPBACK, driver
from serve_app.names import APPLICATION
from serve_app.settings import application, parse
from serve_app.settings.serve_config import BUILD
from tests.waiting import wait_until

OBJECT_STORE_BYTES = 80_000_000  # Ray wants 75 MB at least; requests do not go through it
COMMON: dict[str, Any] = {
    "object_store_memory": OBJECT_STORE_BYTES,
    "node_ip_address": LOOPBACK,
    "include_log_monitor": False,
}
HEAD_CPUS = 4
NODE_START_S = 30.0  # as Ray itself has it, which counts the wall's seconds
NO_PLACE = ""  # the node of a bundle without one
GONE = "?"  # a node this cluster never had, or has no more


class Nodes:
    """The cluster; its nodes have names of ours. Public methods are what can be asked for by `do`."""

    def __init__(self, folder: str) -> None:
        head = {"num_cpus": HEAD_CPUS, "num_gpus": 0, "temp_dir": folder, "include_dashboard": False}
        self._cluster: Any = Cluster(
            initialize_head=True, head_node_args=COMMON | head | {"dashboard_agent_listen_port": 0}
        )
        self._nodes = {"head": self._cluster.head_node}
        self._names = {self._cluster.head_node.node_id: "head"}
        self._engine: Any = None
        self._engine_group: Any = None
        ray.init(
            address=self._cluster.address, namespace=driver.NAMESPACE, logging_level=logging.ERROR, log_to_driver=False
        )

    def serve(self, port: int) -> None:
        serve.start(http_options={"host": LOOPBACK, "port": port}, proxy_location="HeadOnly")

    def deploy(self, config: dict[str, Any]) -> None:
        from serve_app.app import build

        target = serve.RunTarget(build(config), name=APPLICATION, route_prefix="/")
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def declare(self, config: dict[str, Any], override: dict[str, Any]) -> None:
        """Deploy by Serve's own configuration, in which an operator may say other things of a deployment than we."""
        arguments = application(parse(config).without_secrets())["args"]
        entry = {"name": APPLICATION, "route_prefix": "/", "import_path": BUILD, "args": arguments}
        declare(entry | {"deployments": [override]})

    def declare_ours(self, config: dict[str, Any]) -> None:
        """Deploy as `serve-app up` does, with our policy in Serve's controller."""
        declare(application(parse(config).without_secrets()))

    def would_place(self, bundle: dict[str, float]) -> str:
        """The node that Ray chooses for a bundle that is tied to none."""
        group = ray.util.placement_group([bundle], strategy="STRICT_PACK")
        ray.get(group.ready())
        (node,) = placement_group_table(group)["bundles_to_node_id"].values()
        ray.util.remove_placement_group(group)
        return self._names.get(node, GONE)

    def give_up_bundles(self, replica: str) -> None:
        """What our policy does for a replica that is tied to a node which has not got it."""
        give_up_bundles(replica)

    def add(self, name: str, gpus: int, cpus: int) -> None:
        node = self._cluster.add_node(num_gpus=gpus, num_cpus=cpus, wait=False, **COMMON)
        wait_until(lambda: node.node_id in alive_ids(), NODE_START_S, f"node {name} is alive")
        self._nodes[name] = node
        self._names[node.node_id] = name

    def remove(self, name: str) -> None:
        """Take a node away after its own goodbye."""
        self._cluster.remove_node(self._nodes.pop(name))

    def drain(self, name: str, within_s: float | None = None) -> list[dict[str, Any]]:
        """What a worker does at SIGTERM; the node itself is left as it is."""
        return draining.follow_node(ray_drains.RayDrains(), self._nodes[name].node_id, within_s, lambda rows: None)

    def drain_replica(self, replica: str, within_s: float) -> list[dict[str, Any]]:
        """What `serve-app drain` does."""
        return draining.follow_replica(ray_drains.RayDrains(), replica, within_s, lambda rows: None)

    def kill(self, name: str) -> None:
        """Take a node away as a power cut does: Ray's own helper leaves its workers a second or two to live."""
        node = self._nodes.pop(name)
        for service in [one.process.pid for several in node.all_processes.values() for one in several]:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [*psutil.Process(service).children(recursive=True), psutil.Process(service)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def status(self, models: list[str]) -> dict[str, Any]:
        """What `serve-app status` shows, with our names for the nodes."""
        found = operations.application.application_status(models)
        for replica in [*found["routers"], *(one for model in found["models"] for one in model["replicas"])]:
            replica["node"] = self._names.get(replica["node"], GONE) if replica["node"] else NO_PLACE
        return found

    def quota(self) -> dict[str, Any]:
        """What `serve-app quota` shows, with our names for the nodes."""
        found: dict[str, Any] = operations.application.ask_quota("figures")
        for engine in found["engines"]:
            named = [(key.rpartition("/"), size) for key, size in engine["devices"].items()]
            engine["devices"] = {f"{self._names.get(node, GONE)}/{index}": size for (node, _, index), size in named}
        for entry in [*found["kept"], *found["devices"]]:
            node, _, index = entry["device"].rpartition("/")
            entry["device"] = f"{self._names.get(node, GONE)}/{index}"
        return found

    def defrag(self) -> dict[str, Any] | None:
        """What `serve-app defrag` does and says."""
        plan: dict[str, Any] | None = operations.application.ask_quota("defrag", True)
        return plan

    def pids(self, deployment: str) -> list[int]:
        """Processes of the running replicas."""
        from ray.serve.context import _get_global_client

        client: Any = _get_global_client()
        found = client.get_serve_details()["applications"][APPLICATION]["deployments"][deployment]["replicas"]
        return [replica["pid"] for replica in found if replica["pid"]]

    def controller_pid(self) -> int:
        """The process of Serve's controller."""
        from ray.serve.context import _get_global_client

        client: Any = _get_global_client()
        pid: int = ray.get(client._controller.get_pid.remote())
        return pid

    def groups(self) -> list[dict[str, Any]]:
        """The placement groups there are: whose, in which state, and the nodes of their bundles."""
        present = [entry for entry in placement_group_table().values() if entry["state"] != "REMOVED"]
        return [
            {
                "of": entry["name"],
                "state": entry["state"],
                "bundles": [entry["bundles"][index] for index in sorted(entry["bundles"])],
                "nodes": [
                    self._names.get(node, GONE) if node else NO_PLACE
                    for _, node in sorted(entry["bundles_to_node_id"].items())
                ],
            }
            for entry in present
        ]

    def demand(self) -> list[dict[str, Any]]:
        """What Ray's cluster autoscaler is told to make room for."""
        from ray.autoscaler.v2.sdk import get_cluster_status

        wanted = get_cluster_status(self._cluster.address).resource_demands.placement_group_demand
        return [
            {"strategy": one.strategy, "bundles": [vars(bundle) for bundle in one.bundles_by_count]} for one in wanted
        ]

    def engine(self, settings: dict[str, Any], folder: str) -> float:
        """Start vLLM on the counted GPUs; returns seconds. See `placement_vllm`."""
        from tests.cluster import placement_vllm

        self._engine, self._engine_group = placement_vllm.run(settings, folder)
        return float(ray.get(self._engine.start.remote(settings)))

    def engine_tokens(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        tokens: list[list[int]] = ray.get(self._engine.complete.remote(prompts, max_tokens))
        return tokens

    def engine_unhealthy(self) -> list[Any]:
        return list(ray.get(self._engine.unhealthy.remote()))

    def engine_end(self) -> None:
        """Kill the replica's process, and give its bundles back as Serve does then."""
        ray.kill(self._engine)
        ray.util.remove_placement_group(self._engine_group)

    def name_of(self, node_id: str) -> str:
        return self._names.get(node_id, GONE)

    def free_gpus(self) -> float:
        return float(ray.available_resources().get("GPU", 0))

    def alive(self) -> list[str]:
        """Nodes that Ray takes for alive."""
        return sorted(self._names.get(node, GONE) for node in alive_ids())

    def end(self) -> None:
        driver.shut_down()
        self._cluster.shutdown()


def alive_ids() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def registered(gcs_address: str, node_id: str) -> Any:
    """What Ray's `get_node` returns, once the node has started: Ray gives up after 30 s, however slow the machine."""

    def look() -> Any:
        try:
            return GET_NODE(gcs_address, node_id)
        except RuntimeError:  # not yet
            return None

    return wait_until(look, NODE_START_S, f"node {node_id} has started").found


GET_NODE = services.get_node


def main(folder: str) -> None:
    services.get_node = registered
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what Ray prints is not to come between our answers
    nodes = Nodes(folder)
    print(json.dumps({"answer": None}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        method: Callable[..., Any] = getattr(nodes, order.pop("do"))
        try:
            answer = {"answer": method(**order)}
        except Exception as error:  # noqa: BLE001 - the border of the process: whatever it is goes to the test
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
