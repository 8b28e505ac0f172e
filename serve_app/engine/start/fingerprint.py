"""What two engines must have in common for one of them to continue what the other has begun.

Weights, tokenizer, chat template, numeric formats, parallelism, parsers and vLLM's version, as one short text. A model
of the hub counts by its commit, and an argument that names files by these. Of a folder, small files count whole and
each large one by its size and by slices spread over it, so that a model of any size costs a bounded read.

Invariant: equal files at another path, of another age or on another machine give the same text; nothing of our own
release is in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve_app.engine.start.engine_args import engine_arguments
from serve_app.engine.start.environment import Platform
from serve_app.engine.start.model_lookup import cached_folder, weight_files
from serve_app.engine.start.vllm_arguments import vllm_version
from serve_app.settings import ModelSettings

SLICES = (
    64  # of a large file of weights, its head and its tail included: of a shard of 5 GB one in 80 MB, so in every layer
)
SLICE_BYTES = 4096  # as much as is read from a disk at once
WHOLE_BYTES = 64 * 2**20  # of a smaller file all counts, in 0.1 s; the largest tokenizers have half of it
# Of the files beside the weights those that vLLM reads: configuration, index, tokenizer, template, code.
TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.py")
DIGEST_BYTES = 16
COMMIT = re.compile("[0-9a-f]{40}")
# Of vLLM's arguments those that no token depends on: names, sizes of batch, cache and memory, bounds, logs.
WITHOUT_EFFECT = frozenset({
    "allowed_local_media_path",
    "allowed_media_domains",
    "disable_log_stats",
    "distributed_executor_backend",
    "download_dir",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "log_config_file",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "model",
    "revision",
    "scheduling_policy",
    "served_model_name",
    "tokenizer",
    "tokenizer_revision",
})  # fmt: skip


def model_fingerprint(settings: ModelSettings, platform: Platform) -> str | None:
    """The fingerprint of an engine with these settings; None: not known, since the model is not downloaded yet. Reads
    files."""
    if settings.engine == "simulated":
        return f"simulated {settings.simulated.seed}"  # no other setting decides about its text
    arguments = engine_arguments(settings, platform)
    model = _source(arguments["model"], arguments.get("revision"), arguments.get("download_dir"))
    tokenizer = arguments.get("tokenizer")
    if tokenizer is not None:
        tokenizer = _source(tokenizer, arguments.get("tokenizer_revision"), arguments.get("download_dir"))
    if model is None:
        return None
    parts = {
        "model": model,
        "tokenizer": tokenizer,
        "template": _template(settings.chat_template),
        "vllm": vllm_version(),
        "arguments": {name: _value(value) for name, value in arguments.items() if name not in WITHOUT_EFFECT},
        "tools": [settings.tool_parser, settings.tool_strict],
    }
    return _digest(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _source(path: str, revision: str | None, cache: str | None) -> str | None:
    """A model or a tokenizer by its commit or its files; None: it is not downloaded."""
    found: Path | None = Path(path)
    if found is not None and not found.exists():
        found = cached_folder(path, revision, cache)
        if found is not None and COMMIT.fullmatch(found.name):
            return f"{path} {found.name}"  # the id of a repository is a name that all machines share
    return None if found is None else _of_files(found)


def _value(value: Any) -> Any:
    """An argument, with the files that it names in place of their paths; a word without a slash is no path."""
    match value:
        case str() if "/" in value and Path(value).exists():
            return _of_files(Path(value))
        case dict():
            return {name: _value(inner) for name, inner in value.items()}
        case list():
            return [_value(inner) for inner in value]
    return value


def _of_files(path: Path) -> str:
    """A digest of a folder's files, or of one file, by their names within it."""
    total = _digest()
    for file in [path] if path.is_file() else _files(path):
        total.update(json.dumps([file.name, _of_file(file)]).encode())
    return total.hexdigest()


def _files(folder: Path) -> list[Path]:
    texts = {file for pattern in TEXT_FILES for file in folder.glob(pattern)}
    return sorted(file for file in texts | set(weight_files(folder)) if file.is_file())


def _of_file(file: Path) -> str:
    """A digest of a file's size and of what counts of it; an unreadable file counts as such, and vLLM will say why."""
    digest = _digest()
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            digest.update(str(size).encode())
            for offset, length in _slices(size):
                opened.seek(offset)
                digest.update(opened.read(length))
    except OSError:
        return "unreadable"
    return digest.hexdigest()


def _slices(size: int) -> Iterator[tuple[int, int]]:
    """Offset and length of what counts of a file: all of it, or slices at equal distances from its head to its tail."""
    if size <= WHOLE_BYTES:
        yield 0, size
        return
    for number in range(SLICES):
        yield (size - SLICE_BYTES) * number // (SLICES - 1), SLICE_BYTES


def _template(given: str | None) -> str | None:
    """The text of a chat template; vLLM takes a file or the text itself."""
    if given is None:
        return None
    try:
        return Path(given).read_text()
    except (OSError, ValueError):  # no such file: it is the text
        return given


def _digest(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES)
