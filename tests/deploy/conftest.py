"""The image that the long tests of this folder share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy import dockerfile
from tests.requires import requires

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def image() -> Iterator[Path]:
    """The root file system of the CPU image; tests write into layers of their own."""
    requires("root file system")
    folder = Path(tempfile.mkdtemp(prefix="serve-app-image-"))
    try:
        yield dockerfile.Builder(ROOT, folder, {"DEVICE": "cpu"}).build(
            dockerfile.read((ROOT / "deploy" / "Dockerfile").read_text())
        )
    finally:
        shutil.rmtree(folder)
