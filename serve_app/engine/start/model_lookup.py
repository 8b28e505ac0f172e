"""What is known of a model before it is loaded: from its folder, the cache of this machine, or the hub.

Invariant: no weights are downloaded, and nothing is written: of the hub only two small JSON files are read.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from serve_app.engine import tiny_model
from serve_app.engine.start.download_size import INDEX
from serve_app.engine.start.engine_args import TINY, model_path
from serve_app.settings import ModelSettings

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")  # vLLM loads the first of these kinds that is there
INDEXES = (INDEX, "pytorch_model.bin.index.json")  # of weights in several files
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
CONFIG = "config.json"
TOKENIZER = "tokenizer_config.json"
MISTRAL_CONFIG = "params.json"  # vLLM reads this format, too; nothing in it is checked

Problem = Literal[
    "no_such_folder",
    "not_a_model",
    "no_weights",
    "not_an_id",
    "no_such_model",
    "gated",
    "wrong_token",
    "offline",
    "hub_unreachable",
]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of one model.

    Args:
        problem: why it cannot be loaded; None: no reason is known.
        detail: of a problem.
        weights_bytes: of the whole model; None: not known.
        config: its `config.json`; empty: not known.
        has_template: whether a chat template comes with it; None: not known.
    """

    problem: Problem | None = None
    detail: str = ""
    weights_bytes: int | None = None
    config: Mapping[str, Any] | None = None
    has_template: bool | None = None


def look_up(settings: ModelSettings) -> ModelFacts:
    """What is known of a model's weights; asks the hub unless they are here. May take seconds."""
    if settings.engine == "simulated":
        return ModelFacts()
    if settings.path == TINY:
        return ModelFacts(config=tiny_model.CONFIG, has_template=True)
    if (folder := Path(settings.path)).is_dir():
        return _of_folder(folder)
    if settings.path.startswith(("/", ".", "~")):
        return ModelFacts("no_such_folder")
    cached = cached_folder(settings.path)
    facts = None if cached is None else _of_folder(cached)
    return facts if facts is not None and facts.problem is None else _of_hub(settings.path)


def stored(settings: ModelSettings) -> ModelFacts:
    """What is known of a model that is about to start here; writes the built-in model if it is missing."""
    folder = Path(model_path(settings)) if settings.path == TINY and settings.engine != "simulated" else None
    return look_up(settings) if folder is None else _of_folder(folder)


def cached_folder(model_id: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """The folder of a hub's model in the cache of this machine, maybe without some of its files; None: it is not there.
    `revision`: None is the main one; `cache`: None is the usual folder.

    The client is not asked whether all files are there: vLLM downloads only those that it needs."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model_id, revision=revision, cache_dir=cache, local_files_only=True, ignore_patterns="*"
        )
        return Path(found)
    except (OSError, ValueError):  # of huggingface_hub: it is not downloaded, or this is no id
        return None


def weights_bytes(settings: ModelSettings) -> int:
    """The size of a model's weights on this machine; 0 if they are not downloaded yet."""
    if settings.engine == "simulated":
        return 0
    folder: Path | None = Path(model_path(settings))
    if folder is not None and not folder.is_dir():
        folder = cached_folder(settings.path)
    return 0 if folder is None else _weights(folder)


def cache_folder(settings: ModelSettings) -> Path | None:
    """The model's folder in Hugging Face's cache; None: it is a folder of its own, or simulated."""
    if settings.engine == "simulated" or Path(model_path(settings)).is_dir():
        return None
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = settings.extra_engine_args.get("download_dir") or constants.HF_HUB_CACHE
    return Path(folder) / repo_folder_name(repo_id=settings.path, repo_type="model")


def _weights(folder: Path) -> int:
    """The bytes that vLLM loads from a folder; 0: there are none, or an index names files that are not there."""
    files = weight_files(folder)
    return sum(file.stat().st_size for file in files) if all(file.is_file() for file in files) else 0


def weight_files(folder: Path) -> list[Path]:
    """The files with weights that vLLM loads from a folder, whether they are there or only its index names them."""
    here = [file.name for file in folder.iterdir()]
    return [folder / name for name in _indexed(folder) or _first_kind(here)]


def _indexed(folder: Path) -> list[str]:
    """The files that the folder's index names; empty: it has none."""
    maps = [(_read(folder / index) or {}).get("weight_map") for index in INDEXES]
    named = next((found for found in maps if isinstance(found, dict)), {})
    return sorted({name for name in named.values() if isinstance(name, str)})


def _first_kind(names: Iterable[str]) -> list[str]:
    """Those of the first kind of weights among these files."""
    kinds = ([name for name in names if Path(name).match(pattern)] for pattern in WEIGHT_FILES)
    return next((found for found in kinds if found), [])


def _of_folder(folder: Path) -> ModelFacts:
    names = [file.name for file in folder.iterdir() if file.is_file()]  # in a cache they are links, some without a file
    return _facts(names, _weights(folder), _read(folder / CONFIG), _read(folder / TOKENIZER))


def _facts(
    names: Collection[str], size: int, config: dict[str, Any] | None, tokenizer: dict[str, Any] | None
) -> ModelFacts:
    """What is known of a model with files of these names, by the bytes of its weights and what two files say."""
    if config is None and MISTRAL_CONFIG not in names:
        return ModelFacts("not_a_model")
    if not size:
        return ModelFacts("no_weights", config=config)
    has_template = any(name in names for name in TEMPLATE_FILES) or bool((tokenizer or {}).get("chat_template"))
    return ModelFacts(weights_bytes=size, config=config, has_template=has_template)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _of_hub(model_id: str) -> ModelFacts:
    from huggingface_hub import HfApi, errors, utils

    try:
        utils.validate_repo_id(model_id)  # type: ignore[attr-defined]
        HfApi().auth_check(model_id)  # the information about a gated model can be read without access to its files
        return _of_repository(model_id)
    except errors.HFValidationError:
        return ModelFacts("not_an_id")
    except errors.GatedRepoError:
        return ModelFacts("gated")
    except errors.RepositoryNotFoundError:
        return ModelFacts("no_such_model")
    except errors.OfflineModeIsEnabled:
        return ModelFacts("offline")
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # httpx's own, which it passes on
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == HTTPStatus.UNAUTHORIZED:
            return ModelFacts("wrong_token")
        why = str(error).strip().splitlines() or [type(error).__name__]
        return ModelFacts("hub_unreachable", why[0])


def _of_repository(model_id: str) -> ModelFacts:
    from huggingface_hub import HfApi, hf_hub_download

    files = {one.rfilename: one.size or 0 for one in HfApi().model_info(model_id, files_metadata=True).siblings or ()}
    size = sum(files[name] for name in _first_kind(files))
    read: dict[str, dict[str, Any] | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in files.keys() & {CONFIG, TOKENIZER}:
            read[name] = _read(Path(hf_hub_download(model_id, name, local_dir=folder)))
    return _facts(files, size, read.get(CONFIG), read.get(TOKENIZER))
