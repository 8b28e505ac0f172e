"""Which of a hub's files an engine fetches before it loads, and their bytes.

The choice is that of vLLM's default loader (0.32.0: `DefaultModelLoader`, `download_weights_from_hf`); a test compares
the two.

Invariant: a size is that of all files that vLLM fetches, or none is told.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from serve_app.settings import ModelSettings

SAFETENSORS = "*.safetensors"
CONSOLIDATED = "consolidated*.safetensors"
INDEX = "model.safetensors.index.json"  # names the files of a model of several; others beside them are not fetched
# By vLLM's `load_format`: the patterns of its weights; the first one that the repository has counts.
PATTERNS: Mapping[str, Sequence[str]] = {
    "hf": (SAFETENSORS, "*.bin", "*.pt"),
    "safetensors": (SAFETENSORS,),
    "fastsafetensors": (SAFETENSORS,),
    "instanttensor": (SAFETENSORS,),
    "mistral": (CONSOLIDATED,),
    "pt": ("*.pt",),
    "npcache": ("*.bin", "*.pt"),
}
IGNORED = ("original/**/*",)  # vLLM's default: the same weights once more, in Meta's format
HUB_S = 10.0  # for the hub's answer; without it the bytes alone are shown


@dataclass(frozen=True, slots=True)
class Download:
    """The files of one download: their bytes, and their names in the cache's folder `blobs`."""

    total_bytes: int
    blobs: frozenset[str]


def weight_files(
    names: Collection[str], load_format: str = "auto", index: Collection[str] = (), ignored: Sequence[str] = IGNORED
) -> list[str]:
    """The files of weights that vLLM fetches; none for a format that is not known here.

    Args:
        names: all files of the repository.
        index: the files that its `INDEX` names; empty: it has no index.
        ignored: patterns of files that are not fetched.
    """
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    if load_format == "auto":
        load_format = "mistral" if any(fnmatch(Path(name).name, CONSOLIDATED) for name in names) else "hf"
    patterns = PATTERNS.get(load_format, ())
    if not patterns:
        return []
    top = [name for name in names if "/" not in name]
    chosen = next(([one] for one in patterns if any(fnmatch(name, one) for name in top)), list(patterns))
    if index and SAFETENSORS in patterns:
        chosen = list(index)
    return list(filter_repo_objects(names, allow_patterns=chosen, ignore_patterns=list(ignored)))


def ask_hub(settings: ModelSettings) -> Download | None:
    """What vLLM fetches of a model at the hub; None: the hub does not tell. May take seconds."""
    from huggingface_hub import HfApi, errors

    given = settings.extra_engine_args
    revision = given.get("revision")
    ignored = given.get("ignore_patterns", IGNORED)
    try:
        found = HfApi().model_info(settings.path, revision=revision, files_metadata=True, timeout=HUB_S).siblings or ()
        index = _index(settings, revision) if any(one.rfilename == INDEX for one in found) else []
    except (errors.HTTPError, OSError, ValueError):  # type: ignore[attr-defined]  # httpx's own, which it passes on
        return None
    ignored = [ignored] if isinstance(ignored, str) else ignored
    load_format = str(given.get("load_format", "auto")).lower()
    names = set(weight_files([one.rfilename for one in found], load_format, index, ignored))
    wanted = [one for one in found if one.rfilename in names]
    sizes = [one.size for one in wanted if one.size is not None]
    if not sizes or len(sizes) < len(names):
        return None
    blobs = (one.lfs.sha256 if one.lfs is not None else one.blob_id for one in wanted)
    return Download(sum(sizes), frozenset(blob for blob in blobs if blob is not None))


def _index(settings: ModelSettings, revision: str | None) -> list[str]:
    """The files that the index names. vLLM fetches it by the same call before it fetches them."""
    from huggingface_hub import hf_hub_download

    folder = settings.extra_engine_args.get("download_dir")
    file = hf_hub_download(settings.path, INDEX, revision=revision, cache_dir=folder, etag_timeout=HUB_S)
    weights = json.loads(Path(file).read_text()).get("weight_map", {})
    return sorted(set(weights.values()))
