"""What a machine of a cluster is told, and what it gives Ray."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from serve_app.cluster.node import commands
from serve_app.errors import ConfigError
from serve_app.names import MARK
from serve_app.system import environment


def parse(*words: str) -> commands.StartOrder:
    return commands.parse(words, own_address=lambda host: f"to-{host}")


def test_a_head_is_found_by_the_address_it_goes_out_with() -> None:
    order = parse("ray", "start", "--head", "--num-gpus=0")
    assert order.head
    assert order.ip == f"to-{environment.ANYWHERE}"
    assert order.address == f"{order.ip}:6379"
    assert f"--node-ip-address={order.ip}" in order.arguments
    assert f"--object-store-memory={environment.OBJECT_STORE_BYTES}" in order.arguments


def test_a_worker_is_found_by_the_address_it_reaches_its_head_with() -> None:
    order = parse("ray", "start", "--address", "10.0.0.1:7000", "--num-gpus=4")
    assert not order.head
    assert (order.address, order.ip) == ("10.0.0.1:7000", "to-10.0.0.1")


def test_what_the_operator_says_stays() -> None:
    order = parse("ray", "start", "--head", "--port=7", "--node-ip-address", "10.1.1.1", "--object-store-memory=9")
    assert (order.address, order.ip) == ("10.1.1.1:7", "10.1.1.1")
    assert order.arguments == ("--head", "--port=7", "--node-ip-address", "10.1.1.1", "--object-store-memory=9")


def test_a_start_that_stays_hands_ray_a_start_that_does_not() -> None:
    order = parse("ray", "start", "--head", "--block", "--num-cpus=0")
    assert order.block
    assert "--block" not in order.arguments
    assert not parse("ray", "start", "--head").block


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "ray start"),
        (("ray", "stop"), "ray start"),
        (("ray", "start"), "--head or --address"),
        (("ray", "start", "--head", "--address=1.2.3.4:5"), "--head or --address"),
    ],
)
def test_another_order_is_refused_with_its_reason(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(*words)


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    return environment.machine_environment(
        {
            "PATH": "/bin",
            "RAY_ADDRESS": "1.2.3.4:5",
            "RAY_AUTH_TOKEN": "theirs",
            "RAY_AUTH_MODE": "disabled",
            MARK: "theirs",
            "RAY_REDIS_ADDRESS": "redis:6379",
            "RAY_CLOUD_INSTANCE_ID": "i-1",
            "RAY_health_check_timeout_ms": "9000",
            "RAY_USAGE_STATS_ENABLED": "1",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": "/tmp/theirs",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        },
        mark="ours",
        token_file=tmp_path / "token",
        run_dir=tmp_path,
        ip="127.0.0.1",
    )


def test_a_node_asks_for_the_clusters_token_whatever_it_inherited(node: dict[str, str], tmp_path: Path) -> None:
    assert node["RAY_AUTH_MODE"] == "token"
    assert node["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")
    assert "RAY_AUTH_TOKEN" not in node
    assert "RAY_ADDRESS" not in node
    assert node[MARK] == "ours"


def test_a_node_is_on_the_fast_path_and_keeps_its_files_to_itself(node: dict[str, str], tmp_path: Path) -> None:
    assert node["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert node["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    assert node["RAY_worker_niceness"] == "0"
    assert node["RAY_SERVE_HAPROXY_SOCKET_PATH"] == str(tmp_path / "h" / "admin.sock")


def test_the_operators_and_the_launchers_settings_of_ray_win(node: dict[str, str]) -> None:
    assert node["RAY_health_check_timeout_ms"] == "9000"
    assert node["RAY_REDIS_ADDRESS"] == "redis:6379"
    assert node["RAY_CLOUD_INSTANCE_ID"] == "i-1"


def test_the_gcs_keeps_a_bounded_record_of_calls_unless_the_operator_says_otherwise(node: dict[str, str]) -> None:
    assert 0 < int(node["RAY_task_events_max_num_task_in_gcs"]) <= 10_000  # 3.7 kB each; Ray's default is 100,000


def test_what_the_launcher_puts_before_every_command_does_not_reach_the_engines(node: dict[str, str]) -> None:
    assert "OMP_NUM_THREADS" not in node
    assert "PYTHONWARNINGS" not in node
    assert node["RAY_USAGE_STATS_ENABLED"] == "0"


def test_the_ranks_of_an_engine_find_each_other_at_the_nodes_address(node: dict[str, str]) -> None:
    assert node["VLLM_HOST_IP"] == "127.0.0.1"
    assert node["GLOO_SOCKET_IFNAME"] == "lo"


def test_an_address_that_no_interface_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no network interface .* 192\.0\.2\.77"):
        environment.interface_of("192.0.2.77")


def test_a_driver_of_the_cluster_has_nothing_that_breaks_synchronous_calls(tmp_path: Path) -> None:
    given = environment.client_environment("10.0.0.1:6379", tmp_path / "token")
    assert not [name for name in given if name.startswith("RAY_SERVE_")]
    assert given["RAY_AUTH_MODE"] == "token"


def test_a_made_token_is_private_and_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deep" / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    assert commands.main(["token"]) == 0
    token = file.read_text()
    assert len(token) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert commands.main(["token"]) == 0
    assert file.read_text() == token
    assert token not in capsys.readouterr().out


def test_a_run_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = environment.new_run_dir(tmp_path / "run")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "left").write_text("")
    assert list(environment.new_run_dir(folder).iterdir()) == []
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        environment.new_run_dir(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="belongs to another user"):
        environment.new_run_dir(tmp_path / "link")


def test_an_unknown_command_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["begin"]) == 2
    assert "usage: node.sh" in capsys.readouterr().err
