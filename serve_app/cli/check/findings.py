"""The words of every finding, in one table: docs/reference/errors.md shows the same, and a test compares the two.

Invariant: every finding names a setting, what is wrong with it, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found in a configuration. An error: it would not start, or not serve what it says."""

    code: str
    path: str
    severity: Severity
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Words:
    """What a finding says; `{names}` stand for its values."""

    message: str
    remedy: str
    severity: Severity = "error"


WORDS: Mapping[str, Words] = {
    # the file
    "unreadable": Words("{problem}", "correct the file; what it may have: serve-app help settings"),
    "unknown_key": Words("unknown key", "{advice}"),
    "wrong_value": Words("{problem}", "{advice}"),
    "old_name": Words("{problem}", "use the new name", "warning"),
    # keys and tenants
    "key_expired": Words("this key has expired at {at}", "give it a later moment, or remove it", "warning"),
    "no_such_name": Words("there is no model {model} in this configuration", "{advice}", "warning"),
    "share_without_key": Words(
        "{tenant} has a share of {share}, and no key here is of that tenant",
        "give a key `tenant: {tenant}`, or make one with `serve-app keys create`",
        "warning",
    ),
    "no_operator": Words(
        "no key is an operator's: nobody may make keys, or read queues and all tenants' use",
        "set `admin: true` on one of them",
        "warning",
    ),
    "jwks_key_unused": Words("a key of the issuer is not used: {reason}", "have it replaced at the issuer", "warning"),
    # logs
    "prompts_in_logs": Words("routers write all prompts to their logs", "set it to false", "warning"),
    # vLLM's own arguments
    "unknown_engine_arg": Words("vLLM {version} has no engine argument {name}", "{advice}"),
    "wrong_engine_arg": Words("{name} is {value}, and vLLM {version} wants {wanted}", "correct the value"),
    "engine_arg_is_a_setting": Words(
        "{name} overrides what serve-app sets from its own settings", "use the model's setting instead", "warning"
    ),
    "unknown_parser": Words("vLLM {version} has no {kind} {name}", "{advice}"),
    "no_vllm": Words(
        "vLLM is not installed here: its arguments and parsers are not checked", "run the check on a node", "warning"
    ),
    # the model
    "no_such_folder": Words("there is no folder {model}", "correct the path; ids of the hub look like Qwen/Qwen3-8B"),
    "not_a_model": Words("{model} has no readable config.json", "name a folder in Hugging Face's format"),
    "no_weights": Words("{model} has no weights (*.safetensors, *.bin or *.gguf)", "finish the download or the copy"),
    "not_an_id": Words("{model} is neither a folder here nor a possible id of the hub", "correct the path"),
    "no_such_model": Words(
        "the hub has no model {model}, or it is private",
        "correct the id; for a private model set HF_TOKEN of an account that may read it",
    ),
    "gated": Words(
        "{model} is gated, and this account may not read it", "accept its terms on its page, and set HF_TOKEN"
    ),
    "wrong_token": Words(
        "{model} cannot be looked up: the hub does not know the token", "correct HF_TOKEN, or `hf auth login` again"
    ),
    "offline": Words(
        "{model} is not in the cache of this machine, and HF_HUB_OFFLINE forbids to ask the hub",
        "download it first (`hf download {model}`), or unset HF_HUB_OFFLINE",
    ),
    "hub_unreachable": Words(
        "{model} is not in the cache of this machine, and the hub does not answer: {problem}",
        "check network, proxy and HF_ENDPOINT, or copy the model to a folder and name that",
    ),
    "no_chat_template": Words(
        "{model} has no chat template: /v1/chat/completions cannot answer",
        "set chat_template, or use /v1/completions alone",
        "warning",
    ),
    "too_long": Words(
        "max_model_len is {length}, and the model was made for {longest} tokens", "set it to {longest} or less"
    ),
    "heads": Words(
        "tensor_parallel_size is {ranks}, which does not divide the model's {heads} attention heads",
        "use a divisor of {heads}",
    ),
    "kv_heads": Words(
        "tensor_parallel_size is {ranks}, and the model's {heads} heads of keys and values are no divisor or multiple",
        "use a divisor or a multiple of {heads}",
    ),
    "stages": Words(
        "pipeline_parallel_size is {stages}, and the model has {layers} layers", "use {layers} stages or fewer"
    ),
    # the size
    "memory_too_large": Words(
        "a rank needs {need} ({parts}), and the largest device has {have}",
        "lower {setting}, spread the model over more ranks, or use larger devices",
    ),
    "no_kv_left": Words(
        "a rank gets {given}, and weights and overhead take {fixed}: nothing is left for the KV cache",
        "raise {setting}, spread the model over more ranks, or quantize it",
    ),
    "kv_below_length": Words(
        "the KV cache of {kv} holds {tokens} tokens, less than one sequence of {length}",
        "raise kv_cache_gb to {least} or more, or lower max_model_len",
    ),
    "no_node": Words(
        "a replica needs {need} on one node, and the largest node has {have}", "lower {setting}, or use larger nodes"
    ),
    "no_accelerator": Words("no node has a GPU of the type {kind}; there are: {kinds}", "correct accelerator_type"),
    "no_room": Words(
        "all replicas that start at first need {need} together, and the cluster has {have}",
        "lower min_replicas or what a replica needs, or add nodes",
    ),
}
GROWS = " (a node that is added may have it)"  # what a finding about nodes says of a cluster that may get more


def finding(code: str, path: str, *, severity: Severity | None = None, **values: Any) -> Finding:
    """The finding of this code about a setting; `severity`: other than the usual one."""
    words = WORDS[code]
    texts = words.message.format_map(values), words.remedy.format_map(values)
    return Finding(code, path, severity or words.severity, *texts)
