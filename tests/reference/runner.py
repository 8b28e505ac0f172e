"""Runs vLLM's tests against our endpoint, in a process of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from safetensors.numpy import load_file, save_file

from tests.e2e import speech
from tests.e2e.small_models import write_classifier, write_whisper
from tests.reference import sources
from tests.reference.noise import noise_model
from tests.reference.verdict import Outcome, Plan

MODEL = "tiny"
THINKING_MODEL = "tiny-thinks"
EMBEDDER = "tiny-embed"
CLASSIFIER = "tiny-classify"
LISTENER = "tiny-whisper"
SOUND = "sound.wav"  # in place of each recording that their tests fetch from the internet
SOUND_S = 15.5  # of `mary_had_lamb`, whose length they ask for
CLASSES = ("Default", "Spoiled")  # as vLLM's tests of a classifier expect
END_SCALE = 2.75  # an answer then has some 150 tokens
# vLLM's parser `qwen3` takes all before the second one as reasoning. The model has no tokens of this kind but these.
THINK_TAGS = {"<tool_call>": "<think>", "</tool_call>": "</think>"}
THINK_END_SCALE = 11.0  # the reasoning then has some 5 tokens, and one answer in 70 nothing else
THINKING_POSITIONS = 16_384
SHIM = Path(__file__).with_name("shim.py")
WITHOUT = ("cacheprovider", "xdist", "rerunfailures")
RUN_S = 1500.0  # eight minutes on two idle cores


def prepare(plan: Plan, target: Path) -> None:
    """The tests of the plan's version below `target`, and the model: its name is a path for their tokenizers."""
    archive = sources.fetch(plan.version, plan.sha256, sources.cache_folder())
    sources.unpack(archive, target, plan.models)
    shutil.copy(SHIM, target / "tests" / "conftest.py")
    ending_model(target / MODEL)
    thinking_model(target / THINKING_MODEL, target / MODEL)
    write_classifier(target / CLASSIFIER, CLASSES)
    write_whisper(target / LISTENER)
    (target / SOUND).write_bytes(speech.wav(speech.samples(440, SOUND_S)))
    (target / EMBEDDER).symlink_to(MODEL)


def ending_model(folder: Path) -> None:
    """The tiny model with the text of `reference.yaml`: noise, which ends by itself, as the answers of a model do that
    has learned to."""
    noise_model(folder)
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][end] *= END_SCALE
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def thinking_model(folder: Path, ending: Path) -> None:
    """The model whose answers end, changed so that each begins with some reasoning: its tags of tool calls are those of
    reasoning. It takes longer texts, too."""
    shutil.copytree(ending, folder)
    tokens = (folder / "tokenizer.json").read_text()
    for old, new in THINK_TAGS.items():
        tokens = tokens.replace(json.dumps(old), json.dumps(new))
    (folder / "tokenizer.json").write_text(tokens)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": THINKING_POSITIONS}
    (folder / "config.json").write_text(json.dumps(config))
    added = {token["content"]: token["id"] for token in json.loads(tokens)["added_tokens"]}
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][added["</think>"]] *= THINK_END_SCALE
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def run(target: Path, files: Iterable[str], url: str) -> list[Outcome]:
    """The outcomes of all tests in these files that ask a server.

    Raises:
        RuntimeError: pytest itself failed.
    """
    report = target / "report.jsonl"
    report.unlink(missing_ok=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
    variables |= {
        "SERVE_APP_REFERENCE": json.dumps({"url": url, "report": str(report), "sound": str(target / SOUND)}),
        "PYTHONPATH": str(target),
        "HF_HUB_OFFLINE": "1",
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--rootdir", str(target), "-W", "ignore"]
    command += ["-o", "anyio_mode=auto", *(option for plugin in WITHOUT for option in ("-p", f"no:{plugin}"))]
    command += [f"tests/entrypoints/{file}" for file in files if Path(file).name.startswith("test_")]
    with (target / "pytest.log").open("w") as log:
        done = subprocess.run(command, cwd=target, env=variables, stdout=log, stderr=log, timeout=RUN_S, check=False)
    if done.returncode not in (0, 1, 2) or not report.exists():
        raise RuntimeError(f"pytest of vLLM's tests: {(target / 'pytest.log').read_text()[-3000:]}")
    return [Outcome(**json.loads(line)) for line in report.read_text().splitlines()]
