"""What `serve-app check` finds, what it says of it, and of twelve findings a file that has it."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.cli.check.findings import WORDS

# `./my-model` is a model with 8 attention heads, made for 8192 tokens; tests/cli/wrong_files.yaml has what is printed
EXAMPLES: Mapping[str, str] = {
    "unknown_key": "models: [{name: chat, max_num_seq: 8}]",
    "wrong_value": "models: [{name: chat, replicas: {min_replicas: 2}}]",
    "unknown_engine_arg": "models: [{name: chat, extra_engine_args: {enable_chunk_prefill: true}}]",
    "wrong_engine_arg": "models: [{name: chat, extra_engine_args: {seed: one}}]",
    "unknown_parser": "models: [{name: chat, tool_parser: hermse}]",
    "no_such_folder": "models: [{name: chat, path: ./my-modle}]",
    "not_an_id": "models: [{name: chat, path: Qwen/Qwen3/8B}]",
    "too_long": "models: [{name: chat, path: ./my-model, max_model_len: 32768}]",
    "heads": "models: [{name: chat, path: ./my-model, tensor_parallel_size: 3, cpus_per_rank: 0.5}]",
    "memory_too_large": "models: [{name: chat, kv_cache_gb: 10000}]",
    "kv_below_length": "models: [{name: chat, path: ./my-model, kv_cache_gb: 0.01}]",
    "no_room": "models: [{name: chat, replicas: {min_replicas: 9000, max_replicas: 9000}}]",
}


def findings() -> str:
    items = []
    for code, words in WORDS.items():
        warning = " (warning)" if words.severity == "warning" else ""
        example = f". Example: `{EXAMPLES[code]}`" if code in EXAMPLES else ""
        items.append(f"- `{code}`{warning}: {words.message} -> {words.remedy}{example}")
    return "\n".join(items)
