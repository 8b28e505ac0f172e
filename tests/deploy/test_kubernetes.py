"""deploy/kubernetes/rayservice.yaml against the schemas that are to be had here, and what it promises.

Pod templates, the volume claim and the NetworkPolicy are held against Kubernetes' own schema (a pruned copy beside this
file). KubeRay's CRD comes in no package that can be reached here: RAY_SERVICE lists, in our words and with nothing else
allowed, the fields of KubeRay's RayService (v1, its API reference) that the manifest uses. serveConfigV2 is parsed by
Ray's schema and by ours.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from serve_app.cluster.local.draining import REPLACE_S
from serve_app.cluster.node.commands import SUPERVISOR_STOP_S
from serve_app.core.memory import MOVE_S
from serve_app.engine import engine_args
from serve_app.names import RELEASE
from serve_app.settings import application, parse
from tests.deploy import dockerfile

ROOT = Path(__file__).resolve().parents[2]
CLAIM, POLICY, SERVICE = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "rayservice.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
HEAD = CLUSTER["headGroupSpec"]["template"]
(GPU_GROUP,) = CLUSTER["workerGroupSpecs"]
WORKER = GPU_GROUP["template"]
PODS = pytest.mark.parametrize("pod", [HEAD, WORKER], ids=["head", "worker"])
IMAGE = dockerfile.read((ROOT / "deploy" / "Dockerfile").read_text())[-1]
KUBERNETES = json.loads((Path(__file__).parent / "kubernetes-1.37.schema.json").read_text())


def fields(*required: str, **known: Any) -> dict[str, Any]:
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


TEXT, COUNT, YES_NO = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
WORDS = {"type": "object", "additionalProperties": TEXT}
TEMPLATE = {"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}
RAY_SERVICE = KUBERNETES | fields(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=fields("name", name=TEXT, annotations=WORDS),
    spec=fields(
        "rayClusterConfig",
        serveConfigV2=TEXT,
        rayClusterDeletionDelaySeconds=COUNT,
        rayClusterConfig=fields(
            "headGroupSpec",
            rayVersion=TEXT,
            authOptions=fields(mode={"enum": ["disabled", "token"]}),
            enableInTreeAutoscaling=YES_NO,
            autoscalerOptions=fields(version={"enum": ["v1", "v2"]}, idleTimeoutSeconds=COUNT),
            headGroupSpec=fields("template", rayStartParams=WORDS, template=TEMPLATE),
            workerGroupSpecs={
                "type": "array",
                "items": fields(
                    "groupName",
                    "template",
                    "minReplicas",
                    "maxReplicas",
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=WORDS,
                    template=TEMPLATE,
                ),
            },
        ),
    ),
)


def kind(name: str) -> dict[str, Any]:
    return KUBERNETES | {"$ref": f"#/$defs/{name}"}


def serve_config() -> dict[str, Any]:
    return yaml.safe_load(SERVICE["spec"]["serveConfigV2"])  # type: ignore[no-any-return]


def test_the_schemas_take_every_object_and_no_unknown_field() -> None:
    jsonschema.validate(CLAIM, kind("io.k8s.api.core.v1.PersistentVolumeClaim"))
    jsonschema.validate(POLICY, kind("io.k8s.api.networking.v1.NetworkPolicy"))
    jsonschema.validate(SERVICE, RAY_SERVICE)
    for path, name in (
        (("rayClusterConfig",), "rayVersoin"),
        (("rayClusterConfig", "headGroupSpec", "template"), "specs"),
    ):
        wrong = json.loads(json.dumps(SERVICE))
        place = wrong["spec"]
        for step in path:
            place = place[step]
        place[name] = "x"
        with pytest.raises(jsonschema.ValidationError, match=name):
            jsonschema.validate(wrong, RAY_SERVICE)


def test_rays_schema_and_ours_take_the_configuration_as_serve_app_would_write_it() -> None:
    config = ServeDeploySchema.model_validate(serve_config())
    assert config.http_options.port == 8000
    (entry,) = serve_config()["applications"]
    args = parse(entry["args"])
    assert application(args) == entry | {"args": {"release": RELEASE, **args.model_dump(mode="json")}}
    assert CLUSTER["rayVersion"] == ray.__version__


def test_a_worker_holds_a_replica_and_there_are_as_many_as_the_model_may_have() -> None:
    (model,) = parse(serve_config()["applications"][0]["args"]).models
    bundles = engine_args.placement(model, "gpu")["placement_group_bundles"]
    given = WORKER["spec"]["containers"][0]["resources"]["limits"]
    assert float(given["nvidia.com/gpu"]) == sum(bundle["GPU"] for bundle in bundles)
    router_cpus = serve_config()["applications"][0]["args"]["router"]["cpus"]
    assert float(given["cpu"]) >= sum(bundle["CPU"] for bundle in bundles) + router_cpus
    assert (GPU_GROUP["minReplicas"], GPU_GROUP["maxReplicas"]) == (
        model.replicas.min_replicas,
        model.replicas.max_replicas,
    )
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_kubernetes_waits_for_the_drain() -> None:
    (model,) = parse(serve_config()["applications"][0]["args"]).models
    assert WORKER["spec"]["terminationGracePeriodSeconds"] > REPLACE_S + model.drain_s + MOVE_S + SUPERVISOR_STOP_S
    assert SERVICE["spec"]["rayClusterDeletionDelaySeconds"] > model.drain_s
    assert HEAD["spec"]["terminationGracePeriodSeconds"] > SUPERVISOR_STOP_S


@PODS
def test_a_pod_is_the_images_user_with_no_rights(pod: dict[str, Any]) -> None:
    user, group = map(int, IMAGE.last("USER").rest.split(":"))
    given = pod["spec"]["securityContext"]
    assert given["runAsNonRoot"] is True
    assert (given["runAsUser"], given["runAsGroup"], given["fsGroup"]) == (user, group, group)
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@PODS
def test_the_models_are_on_the_claimed_volume(pod: dict[str, Any]) -> None:
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    claim = volumes[mounts[IMAGE.environment()["HF_HOME"]]]["persistentVolumeClaim"]["claimName"]
    assert claim == CLAIM["metadata"]["name"]
    assert set(mounts.values()) == set(volumes)


def test_from_outside_only_the_endpoint_is_open() -> None:
    labels = POLICY["spec"]["podSelector"]["matchLabels"]
    assert HEAD["metadata"]["labels"] == WORKER["metadata"]["labels"] == labels
    of_everyone = [rule["ports"] for rule in POLICY["spec"]["ingress"] if not rule.get("from")]
    assert of_everyone == [[{"port": serve_config()["http_options"]["port"], "protocol": "TCP"}]]
    without_ports = [rule["from"] for rule in POLICY["spec"]["ingress"] if not rule.get("ports")]
    assert without_ports == [[{"podSelector": {"matchLabels": labels}}]]


def test_no_secret_is_in_the_manifest() -> None:
    assert not [key for key in serve_config()["applications"][0]["args"]["auth"]["keys"] if "key" in key]
    for pod in (HEAD, WORKER):
        assert not [one for one in pod["spec"]["containers"][0].get("env", ()) if "value" in one]
    assert CLUSTER["authOptions"] == {"mode": "token"}


@PODS
def test_the_start_command_keeps_the_token_to_itself_and_hands_on_what_kuberay_generated(
    pod: dict[str, Any], tmp_path: Path
) -> None:
    script = tmp_path / "node.sh"
    script.write_text('#!/bin/sh\nprintf "%s\\n" "$$" "$@" > "$HOME/told"\n')
    script.chmod(0o755)
    *shell, text = pod["spec"]["containers"][0]["command"]
    command = [*shell, text.replace("/opt/serve-app/deploy/node.sh", str(script))]
    generated = "ray start --address=head:6379 --block --resources='{\"a b\": 1}'"
    given = {"HOME": str(tmp_path), "RAY_AUTH_TOKEN": "t" * 64, "KUBERAY_GEN_RAY_START_CMD": generated}
    with subprocess.Popen(command, env=os.environ | given) as process:
        assert process.wait(30) == 0
    pid, *told = (tmp_path / "told").read_text().splitlines()
    assert int(pid) == process.pid, "the container's first process is node.sh, which gets the signals"
    assert told == ["start", "ray", "start", "--address=head:6379", "--block", '--resources={"a b": 1}']
    token = tmp_path / ".ray" / "auth_token"
    assert token.read_text().strip() == "t" * 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
