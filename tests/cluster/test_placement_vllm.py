"""A real vLLM pipeline over two nodes, a bundle for each stage: its ranks are in their places and its tokens right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve_app.engine import ensure_tiny_model
from tests.cluster.placement_lab import lab
from tests.e2e import prompts
from tests.e2e.reference import Reference
from tests.requires import requires

requires("linux")
requires("vllm")

PROMPTS = 4
ANSWER_TOKENS = 16
SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "dtype": "float32",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "kv_cache_gb": 0.05,
    "enforce_eager": True,
}
ENGINE_S = 300.0  # four workers import vLLM on two cores: 25 s when nothing else runs


@pytest.mark.long
def test_a_real_pipeline_runs_its_ranks_in_the_bundles_of_their_stages(tmp_path: Path, record_property: Any) -> None:
    reference = Reference(ensure_tiny_model())
    asked = [reference.encode(prompts.text(number)) for number in range(PROMPTS)]
    with lab(order_s=ENGINE_S) as nodes:
        nodes.add("a", 3)  # bundles of one rank would be packed as 3 + 1
        nodes.add("b", 3)
        started_s = nodes.ask("engine", settings=SETTINGS, folder=str(tmp_path))
        ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
        places = [nodes.ask("name_of", node_id=rank["node"]) for rank in ranks]
        assert places[0] == places[1] != places[2] == places[3]
        assert [rank["local_rank"] for rank in ranks] == [0, 1, 0, 1]
        for stage in (ranks[:2], ranks[2:]):
            assert len({gpu for rank in stage for gpu in rank["gpus"]}) == 2
        assert nodes.ask("free_gpus") == 2

        ties = 0
        for prompt, tokens in zip(
            asked, nodes.ask("engine_tokens", prompts=asked, max_tokens=ANSWER_TOKENS), strict=True
        ):
            comparison = reference.compare(prompt, tokens)
            assert comparison.mismatch is None
            ties += comparison.ties

        nodes.kill(places[2] if places[2] != _place_of_replica(nodes) else places[0])
        reported, noticed_s = nodes.ask("engine_unhealthy")
        assert "held a part of this engine, is lost" in reported
        assert noticed_s >= 0, "vLLM did not notice the loss of two of its workers"
        nodes.ask("engine_end")
        nodes.until(lambda: not [rank for rank in ranks if psutil.pid_exists(rank["pid"])], "every rank gone")
        nodes.until(lambda: nodes.ask("free_gpus") == 3, "the GPUs given back")
    record_property("started_s", started_s)
    record_property("noticed_s", noticed_s)
    compared = f"{PROMPTS * ANSWER_TOKENS} tokens equal the library's, {ties} of them ties"
    print(f"{compared}; started in {started_s:.1f} s; the loss of a node noticed by vLLM after {noticed_s:.1f} s")


def _place_of_replica(nodes: Any) -> str:
    """The node of bundle 0, in which the replica itself is."""
    (group,) = nodes.ask("groups")
    return str(group["nodes"][0])
