"""Words of other serving stacks that are unknown keys here: what an error says of them.

Decides: which setting is the counterpart of a word, or why there is none. The place of the key does not count.
"""

from __future__ import annotations

from collections.abc import Mapping

_RANKS = "of each of the tensor_parallel_size x pipeline_parallel_size ranks"
_BATCH_WAIT = (
    "models[].batching.max_wait_s; without batching no request waits for a batch to fill: it joins the running one at "
    "its next step, and models[].preset chooses between short steps and full ones"
)
_LIMITED = "of a key (auth.keys[].limits) or of a tenant (its limits)"

FIELD_WORDS: Mapping[str, str] = {
    "num_replicas": "models[].replicas.min_replicas and max_replicas; both the same: a fixed number",
    "autoscaling_config": "models[].replicas",
    "target_num_ongoing_requests_per_replica": "models[].replicas.target_ongoing_requests",
    "target_ongoing_requests_per_replica": "models[].replicas.target_ongoing_requests",
    "max_concurrent_queries": "models[].max_num_seqs for what runs, admission.max_queued for what waits",
    "max_ongoing_requests": "models[].max_num_seqs for what runs, admission.max_queued for what waits",
    "max_queued_requests": "admission.max_queued",
    "max_batch_size": "models[].max_num_seqs; models[].batching.max_size where requests wait for a batch to fill",
    "batch_timeout_ms": _BATCH_WAIT,
    "batch_wait_timeout_s": _BATCH_WAIT,
    "rpm_limit": f"<limits>.requests_per_minute, {_LIMITED}",
    "tpm_limit": f"<limits>.tokens_per_minute, {_LIMITED}",
    "max_parallel_requests": f"<limits>.max_concurrent, {_LIMITED}",
    "total_vram_gb": "quota.device_gb, of each GPU; without it NVML is asked",
    "num_gpus": f"models[].gpus_per_rank, {_RANKS}",
    "num_cpus": f"models[].cpus_per_rank, {_RANKS}",
}


def counterpart(name: str) -> str | None:
    """What an error says of an unknown key, by its own name without the path; None: it is no such word."""
    known = FIELD_WORDS.get(name)
    return None if known is None else f"counterpart: {known}"
