"""cluster.yaml, deploy/cluster-70b.yaml and deploy/onprem.yaml: what Ray's launcher takes, and what they promise."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from serve_app import settings
from serve_app.engine.start import engine_args, memory_size
from serve_app.errors import ConfigError
from serve_app.system import environment

ROOT = Path(__file__).resolve().parents[3]
CLOUD = ROOT / "cluster.yaml"
ONPREM = ROOT / "deploy" / "onprem.yaml"
CLOUD_70B = ROOT / "deploy" / "cluster-70b.yaml"
EACH = pytest.mark.parametrize("file", [CLOUD, ONPREM, CLOUD_70B], ids=lambda file: file.name)
COMMANDS = (
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
NODE = "~/serve-app/deploy/node.sh"


def load(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())  # type: ignore[no-any-return]


@EACH
def test_rays_own_schema_takes_the_file(file: Path) -> None:
    config = load(file)
    validate_config(prepare_config(config))
    with pytest.raises(Exception, match="Additional properties"):
        validate_config(prepare_config({**config, "hed_start_ray_commands": []}))


@EACH
def test_every_machine_gets_what_setup_and_start_need(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = load(file)["file_mounts"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]]
    needed = [*packages, "deploy", "scripts", "requirements", "pyproject.toml", project["project"]["readme"]]
    needed += [name for name in project["project"]["license-files"] if name.split("/")[0] not in packages]
    assert {f"~/serve-app/{name}": name for name in needed}.items() <= mounts.items()
    for local in mounts.values():
        assert local.startswith("~") or (ROOT / local).exists(), local
    settings.load(ROOT / mounts["~/serve-app.yaml"])
    assert mounts["~/.ray/auth_token"] == "~/.ray/auth_token"


@EACH
def test_ray_is_started_by_the_shared_script_alone(file: Path) -> None:
    config = load(file)
    starts = [line for name in COMMANDS for line in config.get(name, []) if "ray start" in line]
    assert len(starts) == 2
    for line in starts:
        assert re.fullmatch(rf"(\w+=\S+ )*{re.escape(NODE)} start ray start .*", line), line
    assert any(
        f"{NODE} serve-app deploy --config ~/serve-app.yaml" in line for line in config["head_start_ray_commands"]
    )
    assert config["setup_commands"] == [f"{NODE} setup gpu"]


@pytest.mark.parametrize("file", [ONPREM, CLOUD_70B], ids=lambda file: file.name)
def test_all_files_run_the_same_commands(file: Path) -> None:
    cloud = load(CLOUD)
    other = load(file)
    for name in ("setup_commands", "worker_start_ray_commands"):
        assert cloud[name] == other[name]
    project = {there for there in cloud["file_mounts"] if there != "~/serve-app.yaml"}
    assert {there: cloud["file_mounts"][there] for there in project}.items() <= other["file_mounts"].items()
    assert (
        cloud["head_start_ray_commands"][1].rsplit(maxsplit=1)[0]
        == (other["head_start_ray_commands"][1].rsplit(maxsplit=1)[0])
    ), "all but the time to wait"


@pytest.mark.parametrize("file", [CLOUD, CLOUD_70B], ids=lambda file: file.name)
def test_a_machine_in_the_cloud_gets_the_python_that_setup_takes_first(file: Path) -> None:
    (names,) = re.findall(r"^ +for name in (.*); do$", (ROOT / "deploy" / "node.sh").read_text(), re.MULTILINE)
    first = names.split()[0]
    look, install = load(file)["initialization_commands"]
    assert look.startswith(f"command -v {first} || ")
    assert {first, f"{first}-venv", f"{first}-dev"} <= set(install.split())


def test_the_head_has_no_place_for_an_engine() -> None:
    for file in (CLOUD, CLOUD_70B):
        assert load(file)["available_node_types"]["head"]["resources"] == {"CPU": 0, "GPU": 0}
    start, _ = load(ONPREM)["head_start_ray_commands"]
    assert "--num-cpus=0 --num-gpus=0" in start


def test_workers_scale_between_bounds_and_hold_a_replica_of_the_shipped_configuration() -> None:
    config = load(CLOUD)
    worker = config["available_node_types"]["gpu_worker"]
    assert 0 < worker["min_workers"] < worker["max_workers"] <= config["max_workers"]
    (model,) = settings.load(ROOT / config["file_mounts"]["~/serve-app.yaml"]).models
    assert worker["resources"]["GPU"] >= model.tensor_parallel_size > 1


def test_four_nodes_of_eight_gpus_hold_all_replicas_of_the_70b_model() -> None:
    config = load(CLOUD_70B)
    worker = config["available_node_types"]["node_of_8"]
    (model,) = settings.load(ROOT / config["file_mounts"]["~/serve-app.yaml"]).models
    need = engine_args.placement(model, "gpu")["placement_group_bundles"]
    assert (len(need), sum(bundle["GPU"] for bundle in need), sum(bundle["CPU"] for bundle in need)) == (4, 4, 16)
    a_node = min(worker["resources"][kind] // sum(bundle[kind] for bundle in need) for kind in ("GPU", "CPU"))
    assert config["max_workers"] == worker["max_workers"] == 4
    assert a_node * worker["max_workers"] == model.replicas.max_replicas == 8
    assert a_node * worker["min_workers"] >= model.replicas.min_replicas


def test_the_70b_model_fits_on_four_devices_of_80_gb_and_not_of_40() -> None:
    (model,) = settings.load(ROOT / load(CLOUD_70B)["file_mounts"]["~/serve-app.yaml"]).models
    weights = 141_107_412_992  # bytes: 70.55e9 parameters in bfloat16
    need = memory_size.estimated_need(model, "gpu", weights, None)
    wanted, _ = memory_size.memory_request(model, "gpu", need, 80 * 10**9)
    kv_bytes = memory_size.kv_bytes_of(model, need, wanted)
    token_bytes = 80 * 2 * (8 // model.tensor_parallel_size) * 128 * 2  # of a rank: layers, K and V, heads, their size
    assert kv_bytes // token_bytes >= 10 * model.max_model_len
    wanted, _ = memory_size.memory_request(model, "gpu", need, 40 * 10**9)
    with pytest.raises(ConfigError):
        memory_size.kv_bytes_of(model, need, wanted)


def test_what_a_user_fills_in_is_marked() -> None:
    text = CLOUD_70B.read_text()
    marked = "\n".join(
        line
        for before, line in zip(["", *text.splitlines()], text.splitlines(), strict=False)
        if "CHANGE" in before + line
    )
    for field in ("region", "zone", "subnet", "instance profile", "disk", "cache", "InstanceType"):
        assert field in marked, field
    assert "SubnetIds" in text  # as Ray reads it; boto3's own name is another


@cache
def words_of_ray() -> frozenset[str]:
    """Every name in Ray's Python sources and in the binaries that read its configuration."""
    folder = Path(ray.__file__).parent
    found: set[str] = set()
    for source in folder.rglob("*.py"):
        if "thirdparty" not in source.as_posix():
            found.update(re.findall(r"\w+", source.read_text(errors="replace")))
    for binary in (
        folder / "core/src/ray/gcs/gcs_server",
        folder / "core/src/ray/raylet/raylet",
        *folder.glob("_raylet*.so"),
    ):
        found.update(word.decode() for word in re.findall(rb"\w{6,}", binary.read_bytes()))
    return frozenset(found)


def unknown_to_ray(names: Iterable[str]) -> list[str]:
    """Names that Ray does not read. Its configuration's are written without the prefix in its sources."""
    known = words_of_ray()
    return [name for name in names if name not in known and name.removeprefix("RAY_") not in known]


def test_every_variable_of_a_node_is_one_that_ray_reads(tmp_path: Path) -> None:
    given = environment.machine_environment(
        {}, mark="m", token_file=tmp_path / "token", run_dir=tmp_path, ip="127.0.0.1"
    )
    names = [name for name in given if name.startswith("RAY_")]
    assert len(names) > 20
    assert unknown_to_ray(names) == []
    assert unknown_to_ray(["RAY_SERVE_NO_SUCH_THING"]) == ["RAY_SERVE_NO_SUCH_THING"]


@EACH
def test_every_variable_in_the_file_is_one_that_ray_reads(file: Path) -> None:
    names = set(re.findall(r"\bRAY_\w+", file.read_text()))
    assert "RAY_HEAD_IP" in names
    assert file == CLOUD_70B or {"RAY_REDIS_ADDRESS", "RAY_external_storage_namespace"} <= names
    assert unknown_to_ray(names) == []
