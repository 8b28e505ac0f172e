"""Which files of a hub's model are counted: those that vLLM's own loader fetches."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.hf_api import BlobLfsInfo, RepoSibling
from huggingface_hub.utils import filter_repo_objects

from serve_app.engine.start.download_size import INDEX, Download, ask_hub, weight_files
from serve_app.settings import ModelSettings
from tests.requires import requires

MODEL = "org/a-model"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PLAIN = ("config.json", "tokenizer.json", "README.md")
REPOSITORIES: dict[str, tuple[str, ...]] = {
    "one file": (*PLAIN, "model.safetensors"),
    "shards": (*PLAIN, *SHARDS, INDEX),
    "shards and others beside them": (*PLAIN, *SHARDS, INDEX, "adapter.safetensors", "onnx/model.safetensors"),
    "two formats": (*PLAIN, "model.safetensors", "pytorch_model.bin", "flax.msgpack"),
    "meta's format too": (*PLAIN, "model.safetensors", "original/x/consolidated.00.pth", "original/x/y.safetensors"),
    "bins": (*PLAIN, "pytorch_model-1.bin", "pytorch_model-2.bin", "training_args.bin"),
    "pt": (*PLAIN, "weights.pt"),
    "mistral's format": (*PLAIN, "params.json", "consolidated.safetensors", *SHARDS, INDEX),
    "in a folder": (*PLAIN, "quantized/model.safetensors", "quantized/model.bin"),
}


def index_of(names: tuple[str, ...]) -> list[str]:
    return list(SHARDS) if INDEX in names else []


@pytest.mark.parametrize(
    ("repository", "found"),
    [
        ("one file", ["model.safetensors"]),
        ("shards", list(SHARDS)),
        ("shards and others beside them", list(SHARDS)),
        ("two formats", ["model.safetensors"]),
        ("bins", ["pytorch_model-1.bin", "pytorch_model-2.bin", "training_args.bin"]),
        ("mistral's format", ["consolidated.safetensors"]),
    ],
)
def test_the_weights_of_one_format_are_counted(repository: str, found: list[str]) -> None:
    names = REPOSITORIES[repository]
    assert weight_files(names, index=index_of(names)) == found


def test_of_a_format_that_is_not_known_nothing_is_counted() -> None:
    assert weight_files(REPOSITORIES["one file"], "tensorizer") == []


class FakeHub:
    """What vLLM's loader asks the hub for, answered from the names of a repository; `fetched`: what it downloaded."""

    def __init__(self, names: tuple[str, ...], folder: Path) -> None:
        self._names = names
        self._folder = folder
        self.fetched: set[str] = set()

    def ls(self, path: str, **_: Any) -> list[str]:
        return sorted({f"{MODEL}/{name.partition('/')[0]}" for name in self._names})

    def hf_hub_download(self, repo_id: str, filename: str, **_: Any) -> str:
        if filename not in self._names:
            raise errors.LocalEntryNotFoundError(filename)
        file = self._folder / filename
        file.write_text(json.dumps({"weight_map": {f"layer.{one}": one for one in SHARDS}}))
        return str(file)

    def snapshot_download(self, repo_id: str, *, allow_patterns: Any, ignore_patterns: Any, **_: Any) -> str:
        for name in filter_repo_objects(self._names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self._folder / name).touch()
            self.fetched.add(name)
        return str(self._folder)


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "mistral", "pt", "npcache"])
@pytest.mark.parametrize("repository", sorted(REPOSITORIES))
def test_the_files_are_those_that_vllm_fetches(
    repository: str, load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires("vllm")
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import weight_utils
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.transformers_utils import repo_utils

    names = REPOSITORIES[repository]
    hub = FakeHub(names, tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(repo_utils, "list_repo_files", lambda **_: list(names))
    monkeypatch.setattr(weight_utils, "hf_fs", lambda: hub)
    monkeypatch.setattr(weight_utils, "hf_api", lambda: hub)
    monkeypatch.setattr(weight_utils, "get_lock", lambda *_: contextlib.nullcontext())
    loader = DefaultModelLoader(LoadConfig(load_format=load_format))
    with contextlib.suppress(RuntimeError):  # it finds no weights of this format
        loader.download_model(SimpleNamespace(model=MODEL, revision=None))  # type: ignore[arg-type]
    ours = weight_files(names, load_format, index_of(names))
    assert set(ours) == hub.fetched


def sibling(name: str, size: int | None, *, lfs: bool = True) -> RepoSibling:
    about = BlobLfsInfo(size=size or 0, sha256=f"sha-{name}", pointer_size=1) if lfs else None
    return RepoSibling(rfilename=name, size=size, blob_id=f"git-{name}", lfs=about)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Let the hub's client answer with these files, or raise this; returns what it was asked."""

    def use(*files: RepoSibling, error: Exception | None = None) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def model_info(self: Any, repo_id: str, **given: Any) -> Any:
            asked.append({"repo_id": repo_id, **given})
            if error is not None:
                raise error
            return SimpleNamespace(siblings=list(files))

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        return asked

    hub = FakeHub((INDEX,), tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.hf_hub_download)
    return use


def test_the_hub_tells_the_bytes_and_the_names_in_the_cache(answers: Callable[..., list[dict[str, Any]]]) -> None:
    asked = answers(
        sibling("config.json", 900, lfs=False),
        sibling(SHARDS[0], 70),
        sibling(SHARDS[1], 30),
        sibling("other.safetensors", 1000),
        sibling(INDEX, 5, lfs=False),
    )
    model = ModelSettings(name="m", path=MODEL, extra_engine_args={"revision": "v2"})
    assert ask_hub(model) == Download(100, frozenset({f"sha-{SHARDS[0]}", f"sha-{SHARDS[1]}"}))
    assert (asked[0]["repo_id"], asked[0]["revision"], asked[0]["files_metadata"]) == (MODEL, "v2", True)


def test_vllms_arguments_choose_the_files(answers: Callable[..., list[dict[str, Any]]]) -> None:
    answers(sibling("model.safetensors", 100), sibling("weights.pt", 40, lfs=False), sibling("part.safetensors", 1))

    def bytes_of(**arguments: Any) -> int | None:
        found = ask_hub(ModelSettings(name="m", path=MODEL, extra_engine_args=arguments))
        return None if found is None else found.total_bytes

    assert bytes_of() == 101
    assert bytes_of(load_format="pt") == 40
    assert bytes_of(ignore_patterns="part*") == 100
    assert bytes_of(load_format="dummy") is None


@pytest.mark.parametrize(
    "error",
    [errors.OfflineModeIsEnabled("off"), ConnectionError("away"), errors.HFValidationError("no id")],
    ids=lambda error: type(error).__name__,
)
def test_a_hub_that_does_not_tell_leaves_the_size_open(
    answers: Callable[..., list[dict[str, Any]]], error: Exception
) -> None:
    answers(error=error)
    assert ask_hub(ModelSettings(name="m", path=MODEL)) is None


def test_files_without_a_size_leave_it_open(answers: Callable[..., list[dict[str, Any]]]) -> None:
    answers(sibling("a.safetensors", 100), sibling("b.safetensors", None))
    assert ask_hub(ModelSettings(name="m", path=MODEL)) is None
    answers(sibling("config.json", 5))
    assert ask_hub(ModelSettings(name="m", path=MODEL)) is None
