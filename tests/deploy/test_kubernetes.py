"""The manifests of deploy/kubernetes against the schemas that are to be had here, and what they promise.

Pod templates, volume claims, the NetworkPolicy, disruption budgets and the ingress are held against Kubernetes' own
schema (a pruned copy beside this file). The CRDs of KubeRay and of Prometheus' operator come in no package that can be
reached here: RAY_SERVICE, POD_MONITOR, SCRAPE_CONFIG and PROMETHEUS_RULE list, in our words and with nothing else
allowed, the fields of theirs (their API references) that the manifests use. serveConfigV2 is parsed by Ray's schema and
by ours.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from autoscaling.operations.ray_drains import REPLACE_S
from scripts.dashboards.expressions import JOB
from serve_app.cluster.node.commands import SUPERVISOR_STOP_S
from serve_app.core.times import MOVE_S
from serve_app.engine.start import engine_args
from serve_app.http.api.routes import ROUTES
from serve_app.names import RELEASE
from serve_app.settings import AdmissionSettings, application, parse
from serve_app.settings.batch import DEFAULT_MAX_FILE_BYTES
from tests.deploy import dockerfile

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = [
    manifest
    for file in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(file.read_text())
]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in MANIFESTS if manifest["kind"] == kind]


CLAIMS = of_kind("PersistentVolumeClaim")
BUDGETS = of_kind("PodDisruptionBudget")
(POLICY,) = of_kind("NetworkPolicy")
(SERVICE,) = of_kind("RayService")
(INGRESS,) = of_kind("Ingress")
(MONITOR,) = of_kind("PodMonitor")
(SCRAPE,) = of_kind("ScrapeConfig")
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
HEAD = CLUSTER["headGroupSpec"]["template"]
(GPU_GROUP,) = CLUSTER["workerGroupSpecs"]
WORKER = GPU_GROUP["template"]
PODS = pytest.mark.parametrize("pod", [HEAD, WORKER], ids=["head", "worker"])
IMAGE = dockerfile.read((ROOT / "deploy" / "Dockerfile").read_text())[-1]
ENDPOINT = f"{SERVICE['metadata']['name']}-serve-svc"  # as KubeRay names the service of a RayService
SLOW_START_S = 300.0  # of a node: 15 s on an idle machine
KUBERNETES = json.loads((Path(__file__).parent / "kubernetes-1.37.schema.json").read_text())


def fields(*required: str, **known: Any) -> dict[str, Any]:
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
YES_NO = {"type": "boolean"}
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


METADATA = fields("name", name=TEXT, labels=WORDS)


def resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """The schema of a resource of this version and kind, with a name and this `spec`."""
    of_kind = {"apiVersion": {"const": version}, "kind": {"const": kind}}
    return fields("apiVersion", "kind", "metadata", "spec", **of_kind, metadata=METADATA, spec=spec)


POD_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    fields(
        "selector",
        "podMetricsEndpoints",
        selector=fields("matchLabels", matchLabels=WORDS),
        podMetricsEndpoints={"type": "array", "items": fields("port", port=TEXT, interval=TEXT)},
    ),
)
SCRAPE_CONFIG = resource(
    "monitoring.coreos.com/v1alpha1",
    "ScrapeConfig",
    fields(
        "staticConfigs",
        relabelings={"type": "array", "items": fields("targetLabel", targetLabel=TEXT, replacement=TEXT)},
        scrapeInterval=TEXT,
        scrapeTimeout=TEXT,
        metricsPath=TEXT,
        authorization=fields("credentials", credentials=fields("name", "key", name=TEXT, key=TEXT)),
        staticConfigs={"type": "array", "items": fields("targets", targets={"type": "array", "items": TEXT})},
    ),
)

RULE = {
    "oneOf": [
        fields("record", "expr", record=TEXT, expr=TEXT),
        fields("alert", "expr", alert=TEXT, expr=TEXT, labels=WORDS, annotations=WORDS, **{"for": TEXT}),
    ]
}
PROMETHEUS_RULE = resource(
    "monitoring.coreos.com/v1",
    "PrometheusRule",
    fields(
        "groups",
        groups={
            "type": "array",
            "items": fields("name", "rules", name=TEXT, rules={"type": "array", "items": RULE}),
        },
    ),
)


def of_kubernetes(name: str) -> dict[str, Any]:
    return KUBERNETES | {"$ref": f"#/$defs/{name}"}


SCHEMAS = {
    "PersistentVolumeClaim": of_kubernetes("io.k8s.api.core.v1.PersistentVolumeClaim"),
    "NetworkPolicy": of_kubernetes("io.k8s.api.networking.v1.NetworkPolicy"),
    "PodDisruptionBudget": of_kubernetes("io.k8s.api.policy.v1.PodDisruptionBudget"),
    "Ingress": of_kubernetes("io.k8s.api.networking.v1.Ingress"),
    "RayService": RAY_SERVICE,
    "PodMonitor": POD_MONITOR,
    "ScrapeConfig": SCRAPE_CONFIG,
    "PrometheusRule": PROMETHEUS_RULE,
}


def serve_config() -> dict[str, Any]:
    return yaml.safe_load(SERVICE["spec"]["serveConfigV2"])  # type: ignore[no-any-return]


def test_the_schemas_are_schemas() -> None:
    """Kubernetes' own is a part of each, and looked at once: that takes longer than a manifest does."""
    jsonschema.Draft202012Validator.check_schema(KUBERNETES)
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema | {"$defs": {}})


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda manifest: f"{manifest['kind']} {manifest['metadata']['name']}"
)
def test_the_schemas_take_every_object_and_no_unknown_field(manifest: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMAS[manifest["kind"]])
    validator.validate(manifest)
    wrong: dict[str, Any] = json.loads(json.dumps(manifest))
    wrong["spec"]["selecter"] = {}
    with pytest.raises(jsonschema.ValidationError, match="selecter"):
        validator.validate(wrong)


@PODS
def test_a_mistyped_field_of_a_pod_is_seen(pod: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(of_kubernetes("io.k8s.api.core.v1.PodTemplateSpec"))
    validator.validate(pod)
    wrong: dict[str, Any] = json.loads(json.dumps(pod))
    wrong["spec"]["containers"][0]["startupProb"] = {}
    with pytest.raises(jsonschema.ValidationError, match="startupProb"):
        validator.validate(wrong)


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


def claims_of(pod: dict[str, Any]) -> dict[str, str]:
    """The claims that a pod mounts, by the folder."""
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert set(mounts.values()) == set(volumes)
    return {
        folder: volumes[name]["persistentVolumeClaim"]["claimName"]
        for folder, name in mounts.items()
        if "persistentVolumeClaim" in volumes[name]
    }


def test_what_outlives_a_pod_is_on_claimed_volumes() -> None:
    """Weights on every pod, files of batches on the head, which alone reads them, and what is compiled on workers."""
    image = IMAGE.environment()
    files_url = serve_config()["applications"][0]["args"]["batch"]["files_url"]
    files = files_url.removeprefix("file://")
    assert claims_of(HEAD) == {image["HF_HOME"]: "models", files: "files"}
    assert claims_of(WORKER) == {image["HF_HOME"]: "models", f"{image['HOME']}/.cache": "caches"}
    assert {claim["metadata"]["name"] for claim in CLAIMS} == {"models", "files", "caches"}
    # two clusters at once during an upgrade, on different machines
    assert all(claim["spec"]["accessModes"] == ["ReadWriteMany"] for claim in CLAIMS)


@PODS
def test_the_store_is_postgresql_and_its_password_a_secret_on_every_pod(pod: dict[str, Any]) -> None:
    url = urlsplit(serve_config()["applications"][0]["args"]["store"]["url"])
    assert url.scheme == "postgresql+psycopg"
    given = {one["name"]: one for one in pod["spec"]["containers"][0]["env"]}
    assert given["PGPASSWORD"]["valueFrom"] == {"secretKeyRef": {"name": "postgresql", "key": "password"}}


@PODS
def test_a_node_that_starts_slowly_is_not_taken_for_a_dead_one(pod: dict[str, Any]) -> None:
    (container,) = pod["spec"]["containers"]
    startup = container["startupProbe"]
    liveness = container["livenessProbe"]
    assert startup["httpGet"] == liveness["httpGet"]
    assert "initialDelaySeconds" not in liveness, "the startup probe is the delay"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= SLOW_START_S


def test_an_eviction_leaves_workers_and_the_head() -> None:
    """By `minAvailable`: Kubernetes takes `maxUnavailable` only of what has a scale."""
    budgets = {budget["metadata"]["name"]: budget["spec"] for budget in BUDGETS}
    assert set(budgets) == {"serve-app-workers", "serve-app-head"}
    for pod, name in ((HEAD, "serve-app-head"), (WORKER, "serve-app-workers")):
        assert budgets[name]["selector"]["matchLabels"] == pod["metadata"]["labels"]
        assert type(budgets[name]["minAvailable"]) is int
    assert HEAD["metadata"]["labels"] != WORKER["metadata"]["labels"]
    assert 0 < budgets["serve-app-workers"]["minAvailable"] < GPU_GROUP["minReplicas"], "a drain would wait for ever"


def test_prometheus_finds_the_ports_and_is_let_in() -> None:
    labels = MONITOR["spec"]["selector"]["matchLabels"]
    (endpoint,) = MONITOR["spec"]["podMetricsEndpoints"]
    for pod in (HEAD, WORKER):
        assert labels.items() <= pod["metadata"]["labels"].items()
        ports = {one["name"]: one["containerPort"] for one in pod["spec"]["containers"][0]["ports"]}
        assert [{"port": ports[endpoint["port"]], "protocol": "TCP"}] in [
            rule.get("ports") for rule in POLICY["spec"]["ingress"] if rule.get("from")
        ]
    ((target,),) = (one["targets"] for one in SCRAPE["spec"]["staticConfigs"])
    assert target == f"{ENDPOINT}.serve-app.svc:{serve_config()['http_options']['port']}"
    assert SCRAPE["spec"]["relabelings"] == [{"targetLabel": "job", "replacement": JOB}]
    assert ("GET", SCRAPE["spec"]["metricsPath"]) in {(method, path) for method, path, _ in ROUTES}


def test_the_ingress_leads_to_the_endpoint_and_lets_streams_and_files_through() -> None:
    (rule,) = INGRESS["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    port = serve_config()["http_options"]["port"]
    assert path["backend"]["service"] == {"name": ENDPOINT, "port": {"number": port}}
    reported = {name.rpartition("/")[2]: value for name, value in INGRESS["metadata"]["annotations"].items()}
    assert reported["proxy-buffering"] == "off"
    assert float(reported["proxy-read-timeout"]) >= AdmissionSettings().max_wait_s
    assert int(reported["proxy-body-size"].removesuffix("m")) * 2**20 > DEFAULT_MAX_FILE_BYTES
    assert INGRESS["spec"]["tls"][0]["hosts"] == [rule["host"]]


def test_from_outside_only_the_endpoint_is_open() -> None:
    labels = POLICY["spec"]["podSelector"]["matchLabels"]
    for pod in (HEAD, WORKER):
        assert labels.items() <= pod["metadata"]["labels"].items()
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
    pid, *reported = (tmp_path / "told").read_text().splitlines()
    assert int(pid) == process.pid, "the container's first process is node.sh, which gets the signals"
    assert reported == ["start", "ray", "start", "--address=head:6379", "--block", '--resources={"a b": 1}']
    token = tmp_path / ".ray" / "auth_token"
    assert token.read_text().strip() == "t" * 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
