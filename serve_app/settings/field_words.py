"""Words of other serving stacks that are unknown keys here: what an error says of them.

Decides: which setting is the counterpart of a word, or that there is none. The place of the key does not count.
Each message names the page of the documents that has a row for each word.
"""

from __future__ import annotations

from collections.abc import Mapping

PAGE = "What it does not do, and what to use instead"  # its title: an installed package has no files of the documents
_SEE = f'(documents: "{PAGE}")'
_RANKS = "of each of the tensor_parallel_size x pipeline_parallel_size ranks"
_BATCH_WAIT = (
    "models[].batching.max_wait_s; without batching no request waits for a batch to fill: it joins the running one at "
    "its next step, and models[].preset chooses between short steps and full ones"
)
_LIMITED = "of a key (auth.keys[].limits) or of a tenant (its limits)"
_WAITS = "admission.max_wait_s, in seconds, for the wait in the queue"
_SCALED = "models[].replicas, with min_replicas, max_replicas and target_ongoing_requests"
_ENGINE = "models[].extra_engine_args with {} in it, passed on to vLLM as it is"

FIELD_WORDS: Mapping[str, str] = {
    "num_replicas": (
        "models[].replicas.min_replicas and max_replicas; both the same: a fixed number. "
        "models[].replicas.initial_replicas: with how many a new model starts"
    ),
    "autoscaling_config": "models[].replicas",
    "autoscaling": _SCALED,
    "target_num_ongoing_requests_per_replica": "models[].replicas.target_ongoing_requests",
    "target_ongoing_requests_per_replica": "models[].replicas.target_ongoing_requests",
    "max_concurrent_queries": "models[].max_num_seqs for what runs, admission.max_queued for what waits",
    "max_ongoing_requests": "models[].max_num_seqs for what runs, admission.max_queued for what waits",
    "max_queued_requests": "admission.max_queued",
    "max_batch_size": "models[].max_num_seqs; models[].batching.max_size where requests wait for a batch to fill",
    "batch_timeout_ms": _BATCH_WAIT,
    "batch_wait_timeout_s": _BATCH_WAIT,
    "max_wait_ms": f"{_WAITS}; where a batch fills first: {_BATCH_WAIT}",
    "wait_time": f"{_WAITS}; where a batch fills first: {_BATCH_WAIT}",
    "timeout_ms": f"{_WAITS}; a client bounds the wait of one request by the header X-Deadline-Ms; {_BATCH_WAIT}",
    "max_size": "admission.max_queued for the size of a queue, models[].batching.max_size for the size of a batch",
    "priority_classes": (
        "admission.classes, whose names are fixed: low, normal, high, critical. auth.keys[].default_class and "
        "auth.keys[].max_class give them to keys, and the field priority of a request asks for one"
    ),
    "ray_actor_options": (
        f"models[].cpus_per_rank, models[].gpus_per_rank and models[].accelerator_type, {_RANKS}; "
        "router.cpus, of each router"
    ),
    "temperature": (
        "the field temperature, which a client sends with each request; for the default of a model "
        + _ENGINE.format("override_generation_config: {temperature: ...}")
    ),
    "threshold": (
        "models[].replicas.target_ongoing_requests for scaling, models[].long_from_tokens for what counts as long, "
        "quota.defrag_above for fragmented memory"
    ),
    "rpm_limit": f"<limits>.requests_per_minute, {_LIMITED}",
    "tpm_limit": f"<limits>.tokens_per_minute, {_LIMITED}",
    "max_parallel_requests": f"<limits>.max_concurrent, {_LIMITED}",
    "total_vram_gb": "quota.device_gb, of each GPU; without it NVML is asked",
    "gpus": "models[].tensor_parallel_size: so many GPUs for each replica",
    "devices": "models[].tensor_parallel_size: so many GPUs for each replica",
    "rpm": f"<limits>.requests_per_minute, {_LIMITED}",
    "tpm": f"<limits>.tokens_per_minute, {_LIMITED}",
    "num_gpus": f"models[].gpus_per_rank, {_RANKS}",
    "num_cpus": f"models[].cpus_per_rank, {_RANKS}",
    "served_model_name": "models[].name; further names of the same model are routes, each with it as the only target",
    "model_name": "models[].name",
    "model_list": "models[].name and models[].path of each",
    "llm_configs": "models[].name and models[].path of each",
    "engine_kwargs": "models[].extra_engine_args",
    "speculative_config": _ENGINE.format("speculative_config") + "; its requests are not continued on other replicas",
    "master_key": "auth.keys[].key with admin: true",
    "api_key": "auth.keys[].key",
    "request_timeout": "admission.max_wait_s for the wait; a request that runs is not cut off",
    "otlp_traces_endpoint": "traces.endpoint, for the spans of the routers; the engines send none",
    "tool_call_parser": "models[].tool_parser",
    "fallbacks": "routes[].fallbacks, of a name that clients send",
    "model_group_alias": "routes[].name, with one model in routes[].targets[].model",
}
# Words of what is not done here: why, or what is done instead.
ABSENT: Mapping[str, str] = {
    "lora_modules": "adapters are not served; merge one into its model, and serve that as a model of its own",
    "enable_lora": "adapters are not served; merge one into its model, and serve that as a model of its own",
    "kv_transfer_config": "no engine hands its KV cache to another one: prompts are read and answered by one replica",
    "router_settings": "the router chooses replicas by itself, by their free slots and cached prefixes",
    "routing_strategy": "the router chooses replicas by itself, by their free slots and cached prefixes",
    "num_retries": "a request that received nothing is run again elsewhere by itself, once its replica is lost",
    "port": "where the endpoint listens is said by `serve-app up --port`",
    "host": "where the endpoint listens is said by `serve-app up --host`",
    "litellm_params": "only models of this cluster are served, no other endpoint",
}


def counterpart(name: str) -> str | None:
    """What an error says of an unknown key, by its own name without the path; None: it is no such word."""
    if (known := FIELD_WORDS.get(name)) is not None:
        return f"counterpart: {known} {_SEE}"
    absent = ABSENT.get(name)
    return None if absent is None else f"there is none here: {absent} {_SEE}"
