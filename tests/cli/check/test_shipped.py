"""Every configuration that is shipped fits the machine that it names, by the arithmetic of an engine's start."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli import check_command
from serve_app.cli.check import Cluster, Finding, Node, assumed_cluster, assumed_nodes, check_fit, check_model
from serve_app.cli.commands import app
from serve_app.engine import tiny_model
from serve_app.engine.start.environment import Platform
from serve_app.engine.start.memory_size import estimated_need
from serve_app.engine.start.model_lookup import ModelFacts
from serve_app.errors import ConfigError
from serve_app.settings import GB, ModelSettings, QuotaSettings, Settings, load, parse
from tests.requires import requires

requires("linux")

ROOT = Path(__file__).resolve().parents[3]
READY = sorted((ROOT / "serve_app/settings/configs").glob("*.yaml"))
LAUNCHERS = [ROOT / "cluster.yaml", ROOT / "deploy/cluster-70b.yaml", ROOT / "deploy/onprem.yaml"]
MANIFEST = ROOT / "deploy/kubernetes/rayservice.yaml"
ASSUMED = re.compile(r"serve-app check \S+ --assume (\w[\w-]*)")
# The machines of a cloud that the launchers name, as `--assume` has them.
INSTANCES = {"g6e.12xlarge": "4xL40S", "g6.12xlarge": "4xL4", "p4de.24xlarge": "8xA100-80GB", "p5.48xlarge": "8xH100"}
SMALL = Cluster((Node(2.0, 0.0, (4 * GB,)),))  # a machine without GPUs: two cores, 8 GB, half of them for engines

QWEN: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "torch_dtype": "bfloat16",
}
# What the hub says of the models: their config.json, and the bytes of their weights.
MODELS = {
    "Qwen/Qwen3-8B": ModelFacts(
        weights_bytes=16_381_470_720,
        config=QWEN | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36},
        has_template=True,
    ),
    "Qwen/Qwen3-8B-FP8": ModelFacts(
        weights_bytes=9_450_000_000,
        config=QWEN
        | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36}
        | {"quantization_config": {"quant_method": "fp8"}},
        has_template=True,
    ),
    "Qwen/Qwen3-32B": ModelFacts(
        weights_bytes=65_524_246_528,
        config=QWEN
        | {"num_attention_heads": 64, "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64},
        has_template=True,
    ),
    "meta-llama/Llama-3.3-70B-Instruct": ModelFacts(
        weights_bytes=141_107_412_992,
        config={
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "torch_dtype": "bfloat16",
            "hidden_size": 8192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
        },
        has_template=True,
    ),
    "tiny": ModelFacts(config=tiny_model.CONFIG, has_template=True),
}


def look_up(model: ModelSettings) -> ModelFacts:
    return MODELS[model.path]


def findings(settings: Settings, cluster: Cluster, platform: Platform) -> list[Finding]:
    facts = [look_up(model) for model in settings.models]
    needs = [
        estimated_need(model, platform, known.weights_bytes or 0, known.config)
        for model, known in zip(settings.models, facts, strict=True)
    ]
    found = check_fit(settings, facts, needs, cluster, platform)
    for index, (model, known) in enumerate(zip(settings.models, facts, strict=True)):
        found += check_model(f"models.{index}", model, known, here=False)
    return found


def named_machine(file: Path) -> str:
    """What the file says to check it against."""
    (machine,) = set(ASSUMED.findall(file.read_text()))
    return machine


def on(machine: str) -> Cluster:
    return assumed_cluster(assumed_nodes([machine]), QuotaSettings())


def manifest() -> Settings:
    (service,) = (one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "RayService")
    (entry,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return parse(entry["args"])


def launched(file: Path) -> Settings:
    return load(ROOT / yaml.safe_load(file.read_text())["file_mounts"]["~/serve-app.yaml"])


@pytest.mark.parametrize("file", READY, ids=lambda file: file.name)
def test_a_ready_configuration_fits_the_machine_it_names(file: Path) -> None:
    settings = load(file)
    if all(model.path == "tiny" for model in settings.models):
        assert findings(settings, SMALL, "cpu") == []
    else:
        assert findings(settings, on(named_machine(file)), "gpu") == []


@pytest.mark.parametrize("file", LAUNCHERS, ids=lambda file: file.name)
def test_a_cluster_s_machines_hold_the_configuration_that_it_deploys(file: Path) -> None:
    machine = named_machine(file)
    assert findings(launched(file), on(machine), "gpu") == []
    for node in yaml.safe_load(file.read_text()).get("available_node_types", {}).values():
        if node["resources"]["GPU"]:
            assert INSTANCES[node["node_config"]["InstanceType"]] == machine.partition("x")[2]


def test_the_manifest_s_workers_hold_its_models() -> None:
    assert findings(manifest(), on(named_machine(MANIFEST)), "gpu") == []


@pytest.mark.parametrize(
    ("settings", "machine", "code"),
    [
        ({"path": "Qwen/Qwen3-8B", "max_model_len": 32768, "max_num_seqs": 128}, "1xL4", "no_kv_left"),
        ({"path": "Qwen/Qwen3-32B", "max_model_len": 32768, "tensor_parallel_size": 4}, "4xL4", "kv_below_length"),
        ({"path": "Qwen/Qwen3-8B-FP8", "max_model_len": 32768}, "1xT4", "no_kv_left"),
        ({"path": "Qwen/Qwen3-8B-FP8", "max_model_len": 40960, "memory_gb": 17}, "1xL4", "kv_below_length"),
        ({"path": "Qwen/Qwen3-32B", "tensor_parallel_size": 8}, "4xL40S", "no_node"),
    ],
)
def test_what_does_not_fit_is_found(settings: dict[str, Any], machine: str, code: str) -> None:
    (found,) = findings(parse({"models": [{"name": "m", **settings}]}), on(machine), "gpu")
    assert found.code == code
    assert "inf" not in found.message


def test_nodes_are_assumed_by_their_number_gpus_and_kind() -> None:
    (node,) = on("4xl4").nodes
    assert (node.gpus, node.kinds, node.cpus) == (4.0, ("L4",), math.inf)
    assert set(node.device_bytes) == {23_034 * 2**20 - 2 * GB}
    assert len(on("2x8xH100").nodes) == 2
    assert on("1xA100-80gb").nodes[0].kinds == ("A100", "A100-80G")
    both = assumed_cluster(assumed_nodes(["1xL4", "1xH100"]), QuotaSettings(device_gb=10))
    assert [node.device_bytes for node in both.nodes] == [(8 * GB,), (8 * GB,)]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("4xL44", "did you mean L4"),
        ("4xQuantum", "known are T4"),
        ("L4", "write the GPUs of a node"),
        ("0xL4", "write the GPUs of a node"),
        ("9999x8xL4", "write the GPUs of a node"),
        ("", "write the GPUs of a node"),
    ],
)
def test_a_machine_that_is_not_known_is_reported_with_what_is(text: str, reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        assumed_nodes([text])


def test_the_command_checks_against_machines_that_are_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_command.model_lookup, "look_up", look_up)
    file = tmp_path / "my.yaml"
    file.write_text("models: [{name: a, path: Qwen/Qwen3-32B, tensor_parallel_size: 4, max_model_len: 32768}]")

    def codes(*machines: str) -> tuple[int, list[str]]:
        given = [part for machine in machines for part in ("--assume", machine)]
        done = CliRunner().invoke(app, ["check", str(file), "--json", *given], env={"RAY_ADDRESS": None})
        return done.exit_code, [one["code"] for one in json.loads(done.stdout)["findings"]]

    assert codes("4xL4") == (2, ["kv_below_length"])
    assert codes("4xL40S") == (0, [])
    assert codes("4xL4", "4xH100") == (0, [])
    unknown = CliRunner().invoke(app, ["check", str(file), "--assume", "4xL444"], env={"RAY_ADDRESS": None})
    assert unknown.exit_code == 2
    assert "is not in the table of GPUs" in unknown.stderr
