"""The findings about one model: whether it can be loaded at all, and whether its settings fit it. Pure.

Invariant: what is not known of a model is not complained about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.cli.check.findings import Finding, Severity, finding
from serve_app.engine.start import model_lookup
from serve_app.settings import ModelSettings

CONFIG_ARGUMENTS = frozenset({"hf_overrides", "hf_config_path"})  # of vLLM: its configuration is not the file


def check_model(path: str, model: ModelSettings, facts: model_lookup.ModelFacts, *, here: bool) -> list[Finding]:
    """What is wrong with a model.

    Args:
        path: of its settings, `models.0`.
        here: it is to run on this machine; else what this machine lacks may be on the nodes.
    """
    if facts.problem is not None:
        certain = here or facts.problem in ("no_such_model", "gated", "not_an_id")
        severity: Severity | None = None if certain else "warning"
        return [finding(facts.problem, f"{path}.path", severity=severity, model=model.path, problem=facts.detail)]
    found: list[Finding] = []
    if model.task == "generate" and facts.has_template is False and model.chat_template is None:
        found.append(finding("no_chat_template", f"{path}.chat_template", model=model.path))
    config = text_config(model, facts.config)
    longest = longest_tokens(config)
    if longest is not None and model.max_model_len is not None and model.max_model_len > longest:
        values: dict[str, Any] = {"length": model.max_model_len, "longest": longest}
        found.append(finding("too_long", f"{path}.max_model_len", **values))
    heads = config.get("num_attention_heads")
    ranks = model.tensor_parallel_size
    uneven_heads = isinstance(heads, int) and bool(heads % ranks)
    if uneven_heads:
        found.append(finding("heads", f"{path}.tensor_parallel_size", ranks=ranks, heads=heads))
    kv_heads = config.get("num_key_value_heads")
    if isinstance(kv_heads, int) and kv_heads > 0 and kv_heads % ranks and ranks % kv_heads and not uneven_heads:
        found.append(finding("kv_heads", f"{path}.tensor_parallel_size", ranks=ranks, heads=kv_heads))
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers < model.pipeline_parallel_size:
        stages = model.pipeline_parallel_size
        found.append(finding("stages", f"{path}.pipeline_parallel_size", stages=stages, layers=layers))
    return found


def text_config(model: ModelSettings, config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The part of a `config.json` about text: of a model that sees images, a part of its own. Nothing where vLLM is
    told to read something else."""
    if not CONFIG_ARGUMENTS.isdisjoint(model.extra_engine_args):
        return {}
    inner = (config or {}).get("text_config")
    return inner if isinstance(inner, Mapping) else config or {}


def longest_tokens(config: Mapping[str, Any]) -> int | None:
    """The model's own length; None: not known, or stretched by a factor that vLLM works out."""
    length = config.get("max_position_embeddings")
    scaled = any("factor" in (config.get(name) or {}) for name in ("rope_scaling", "rope_parameters"))
    return length if isinstance(length, int) and not scaled else None


def kv_bytes_per_token(model: ModelSettings, config: Mapping[str, Any]) -> float | None:
    """Bytes of KV cache of one token on one rank, for models with the same full attention in each layer; None: for
    other models, and where it is not known."""
    unlike = ("kv_lora_rank", "sliding_window", "layer_types", "attn_type_list", "linear_attn_config")
    if any(config.get(name) for name in unlike) or "kv_cache_dtype" in model.extra_engine_args:
        return None
    layers, heads, hidden = (config.get(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)):
        return None
    head_size = config.get("head_dim") or hidden // heads
    kv_heads = max(1, (config.get("num_key_value_heads") or heads) // model.tensor_parallel_size)
    element = 4 if model.dtype == "float32" else 2
    return float(2 * layers / model.pipeline_parallel_size * kv_heads * head_size * element)
