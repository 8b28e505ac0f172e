"""vLLM's own benchmark, by the command of docs/reference/clients.md."""

from __future__ import annotations

import pytest

from tests.clients import bench
from tests.e2e.stack import Stack


@pytest.mark.long
def test_vllm_bench_serve_has_all_its_requests_answered(stack: Stack) -> None:
    assert bench.failure(stack) is None
