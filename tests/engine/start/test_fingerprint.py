"""Which engines may go on with each other's streams: equal for equal files wherever they are, else different."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine.start.fingerprint import SLICE_BYTES, SLICES, WHOLE_BYTES, model_fingerprint
from serve_app.engine.tiny_model import ensure_tiny_model
from serve_app.settings import ModelSettings

SHARD_BYTES = WHOLE_BYTES + 2**20  # many times what is read of it
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder as of a large model: an index and two shards, larger than what is read of them."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"version": "1"}')
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("model-1.safetensors", "model-2.safetensors"):
        sparse(folder / name, SHARD_BYTES)
    return folder


def of(path: Path | str, **settings: Any) -> str | None:
    return model_fingerprint(ModelSettings(name="m", path=str(path), **settings), "cpu")


def sparse(file: Path, size: int) -> None:
    """A file of zeros that takes no room."""
    file.touch()
    os.truncate(file, size)


def poke(file: Path, offset: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(b"x")


def test_the_same_files_at_another_path_and_of_another_age_are_equal(tiny: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny, tmp_path / "elsewhere"))
    for file in copy.iterdir():
        os.utime(file, (1.0, 1.0))
    (copy / "README.md").write_text("a copy")
    assert of(copy) == of(tiny)
    assert of(copy, max_num_seqs=3, kv_cache_gb=0.1, max_model_len=64, generation=7) == of(tiny)
    assert of(copy, extra_engine_args={"tokenizer": str(tiny)}) == of(tiny, extra_engine_args={"tokenizer": str(copy)})


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"quantization": "fp8"},
        {"tensor_parallel_size": 2},
        {"chat_template": "{{ messages }}"},
        {"tool_parser": "hermes"},
        {"tool_strict": False},
        {"extra_engine_args": {"kv_cache_dtype": "fp8"}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_other_settings_of_what_the_engine_computes_are_another_model(tiny: Path, settings: dict[str, Any]) -> None:
    assert of(tiny, **settings) != of(tiny)


def test_other_weights_of_the_same_shape_are_another_model(tiny: Path, tmp_path: Path) -> None:
    assert of(ensure_tiny_model(tmp_path, seed=1)) != of(tiny)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: poke(folder / "model-2.safetensors", 0),
        lambda folder: poke(folder / "model-2.safetensors", SHARD_BYTES - 1),
        lambda folder: poke(folder / "model-1.safetensors", (SHARD_BYTES - SLICE_BYTES) * 20 // (SLICES - 1)),
        lambda folder: sparse(folder / "model-1.safetensors", SHARD_BYTES + 1),
        lambda folder: (folder / "tokenizer.json").write_text('{"version": "2"}'),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        lambda folder: (folder / "modeling_own.py").write_text("scale = 2"),
    ],
    ids=["head", "tail", "slice", "size", "tokenizer", "template", "index", "code"],
)
def test_one_changed_file_is_another_model(sharded: Path, change: Callable[[Path], object]) -> None:
    before = of(sharded)
    change(sharded)
    assert of(sharded) != before


def test_of_a_shard_only_slices_are_read(sharded: Path) -> None:
    """A byte between two slices is not seen: a model of any size costs a bounded read."""
    before = of(sharded)
    poke(sharded / "model-1.safetensors", SLICE_BYTES + 1)
    assert of(sharded) == before


def test_a_small_shard_counts_whole(sharded: Path) -> None:
    sparse(sharded / "model-1.safetensors", 2**20)
    before = of(sharded)
    poke(sharded / "model-1.safetensors", SLICE_BYTES + 1)
    assert of(sharded) != before


@pytest.mark.parametrize(
    "argument",
    [
        lambda path: {"hf_config_path": path},
        lambda path: {"reasoning_parser_plugin": f"{path}/plugin.py"},
        lambda path: {"speculative_config": {"model": path, "num_speculative_tokens": 2}},
    ],
    ids=["folder", "file", "in an object"],
)
def test_an_argument_that_names_files_counts_by_these(
    tiny: Path, tmp_path: Path, argument: Callable[[str], dict[str, Any]]
) -> None:
    folders = [tmp_path / name for name in ("here", "elsewhere", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text(f'{{"other": {str(folder.name == "other").lower()}}}')
        (folder / "plugin.py").write_text(f"OTHER = {folder.name == 'other'}")
    here, elsewhere, other = (of(tiny, extra_engine_args=argument(str(folder))) for folder in folders)
    assert here == elsewhere != other
    assert here != of(tiny)


def test_a_template_counts_by_its_text_wherever_its_file_is(tiny: Path, tmp_path: Path) -> None:
    text = "{{ messages[0]['content'] }}"
    (tmp_path / "one.jinja").write_text(text)
    assert of(tiny, chat_template=str(tmp_path / "one.jinja")) == of(tiny, chat_template=text)


def test_a_model_of_the_hub_counts_by_its_commit_and_is_not_known_before_it_is_downloaded(tmp_path: Path) -> None:
    given = {"extra_engine_args": {"download_dir": str(tmp_path)}}
    assert of("org/model", **given) is None
    found = []
    for commit in (COMMIT, COMMIT[::-1]):
        repository = tmp_path / "models--org--model"
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        found.append(of("org/model", **given))
    assert None not in found
    assert found[0] != found[1]
    pinned = {"extra_engine_args": {"download_dir": str(tmp_path), "revision": COMMIT}}
    assert of("org/model", **pinned) == found[0]
