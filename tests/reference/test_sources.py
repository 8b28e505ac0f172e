"""Only an archive with the hash that is written down is unpacked, and only names of models change in it."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from tests.reference import sources

MODULE = """
MODEL_NAME = "Qwen/Qwen3-0.6B"
ROWS = ["Qwen/Qwen3-0.6B", "other/name"]
@fixture(params=["a/b", "c/d"])
MODELS: list = [
    ("e/f", []),
    ("g/h", []),
]
"""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "vllm-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for name in ("tests/entrypoints/test_a.py", "tests/conftest.py", "vllm/code.py", "tests/data.bin"):
            entry = tarfile.TarInfo(f"vllm-1.0/{name}")
            entry.size = len(MODULE)
            packed.addfile(entry, io.BytesIO(MODULE.encode()))
    return path


def test_an_archive_that_is_there_is_checked_and_not_fetched_again(archive: Path) -> None:
    right = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert sources.fetch("1.0", right, archive.parent) == archive
    with pytest.raises(RuntimeError, match="SHA-256"):
        sources.fetch("1.0", "0" * 64, archive.parent)


def test_only_tests_are_unpacked_with_the_name_of_our_model(archive: Path, tmp_path: Path) -> None:
    sources.unpack(archive, tmp_path / "out", {"test_a.py": "tiny"})
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert [file.name for file in files] == ["test_a.py"]
    renamed = MODULE
    for name in ("Qwen/Qwen3-0.6B", "a/b", "e/f"):
        renamed = renamed.replace(name, "tiny")
    assert files[0].read_text() == renamed
    assert sources.files_with_servers(tmp_path / "out") == []


def test_a_file_that_is_to_run_and_is_gone_is_named(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="gone/test_b"):
        sources.unpack(archive, tmp_path / "out", {"gone/test_b.py": "tiny"})
