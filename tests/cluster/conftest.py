"""One cluster of several nodes for all tests that place engines (`placement_lab`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.placement_lab import Lab, lab


@pytest.fixture(scope="package")
def cluster() -> Iterator[Lab]:
    """Started with the first test that asks for it, taken down after the package's last."""
    with lab() as started:
        yield started


@pytest.fixture
def nodes(cluster: Lab) -> Iterator[Lab]:
    """The head alone, and no model but the anchor; the same again after the test."""
    yield cluster
    cluster.empty()
