"""The configuration: one frozen tree, checked before anything is started.

Invariant: what parses is runnable as far as can be told without the hardware; an unknown key is an error that names it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from serve_app.errors import ConfigError
from serve_app.types import RequestClass

DEFAULT_MAX_BODY_BYTES = 8 * 2**20  # a 128K-token prompt is about 0.6 MB; vision inputs are links or a few MB
DEFAULT_MAX_JSON_DEPTH = 64  # nested JSON schemas of real tools stay under 20; parsers recurse per level
DEFAULT_MAX_SEQUENCES = 8  # per request: n x prompts; vLLM's own default of 16384 lets one call fill the engine
DEFAULT_MAX_EMBEDDING_INPUTS = 2048  # OpenAI's own bound on the inputs of one embeddings call
DEFAULT_MAX_QUEUED = 1000  # requests waiting per model; the middle size the field uses (256, 1,000, 10,000)
DEFAULT_MAX_WAIT_S = 60.0  # above the slowest first token we promise anyone
DEFAULT_NO_REPLICA_WAIT_S = 60.0  # a crashed replica of a small model is back in less; raise it for slow loads
DEFAULT_MAX_NUM_SEQS = 64  # sequences one engine step runs; the knee of the batch curve on two cores
DEFAULT_KV_CACHE_GB = 0.5  # CPU only, where the engine cannot measure what is free: 0.5 GiB holds 64 tiny sequences
DEFAULT_HEALTH_STALL_S = 30.0  # a step of a big prefill takes seconds; 30 s without CPU time or a step is frozen
DEFAULT_DRAIN_S = 600.0  # Serve kills streams that outlast it; the longest answer we promise takes minutes

ClassName = Literal["low", "normal", "high", "critical"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AutoscaleSettings(_Frozen):
    """Replica bounds and Serve's autoscaling on ongoing requests per replica."""

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: float = Field(20.0, gt=0)
    upscale_delay_s: float = Field(30.0, ge=0)
    downscale_delay_s: float = Field(120.0, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> AutoscaleSettings:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        return self


class SimulatedSettings(_Frozen):
    """Rates of the simulated engine (tests and load studies; never what `make serve` runs)."""

    prefill_tokens_per_s: float = Field(20_000.0, gt=0)
    decode_step_s: float = Field(0.02, ge=0)
    kv_cache_tokens: int = Field(65_536, ge=16)
    seed: int = 0


class ModelSettings(_Frozen):
    """One model: an engine deployment of its own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=200)]
    path: str = "tiny"  # "tiny" is the built-in model; else a Hugging Face id or a folder
    engine: Literal["vllm", "simulated"] = "vllm"
    task: Literal["generate", "embed"] = "generate"
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    pipeline_parallel_size: int = Field(1, ge=1, le=64)
    replicas: AutoscaleSettings = AutoscaleSettings()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: str | None = None
    max_model_len: int | None = Field(None, ge=16)
    max_num_seqs: int = Field(DEFAULT_MAX_NUM_SEQS, ge=1, le=4096)
    max_num_batched_tokens: int | None = Field(None, ge=16)
    kv_cache_gb: float | None = Field(None, gt=0)  # per rank; None: sized by gpu_memory_utilization on GPUs
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None
    media_domains: tuple[str, ...] = ()  # hosts that images in requests may be fetched from; none: none
    cpus_per_rank: float = Field(1.0, ge=0)
    gpus_per_rank: float = Field(1.0, ge=0, le=1)  # used only where the cluster has GPUs
    accelerator_type: str | None = None
    health_stall_s: float = Field(DEFAULT_HEALTH_STALL_S, gt=0)
    drain_s: float = Field(DEFAULT_DRAIN_S, gt=0)
    extra_engine_args: dict[str, Any] = {}  # passed to vLLM's AsyncEngineArgs as they are
    simulated: SimulatedSettings = SimulatedSettings()

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class KeySettings(_Frozen):
    """One API key. Give the key itself, or its SHA-256 (hex) so that the file holds no secret."""

    key: str | None = Field(None, min_length=16)
    key_sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field("default", min_length=1, max_length=64)
    max_class: ClassName = "high"
    default_class: ClassName = "normal"

    @model_validator(mode="after")
    def _one_secret(self) -> KeySettings:
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError("give exactly one of key and key_sha256")
        if RequestClass[self.default_class.upper()] > RequestClass[self.max_class.upper()]:
            raise ValueError(f"default_class {self.default_class!r} is above max_class {self.max_class!r}")
        return self

    def without_secret(self) -> KeySettings:
        """The same key by its SHA-256 alone: the only form that leaves the process that read the configuration."""
        if self.key is None:
            return self
        digest = hashlib.sha256(self.key.encode()).hexdigest()
        return self.model_copy(update={"key": None, "key_sha256": digest})


class AuthSettings(_Frozen):
    """Who may call. Without keys one is generated at start and kept in `key_file` with mode 0600."""

    keys: tuple[KeySettings, ...] = ()
    key_file: str | None = None


class AdmissionSettings(_Frozen):
    """The waiting line in front of each model."""

    max_queued: int = Field(DEFAULT_MAX_QUEUED, ge=0)
    max_wait_s: float = Field(DEFAULT_MAX_WAIT_S, gt=0)
    no_replica_wait_s: float = Field(DEFAULT_NO_REPLICA_WAIT_S, gt=0)


class HttpSettings(_Frozen):
    """Bounds of the public endpoint."""

    max_body_bytes: int = Field(DEFAULT_MAX_BODY_BYTES, ge=1024)
    max_json_depth: int = Field(DEFAULT_MAX_JSON_DEPTH, ge=4, le=512)
    max_sequences: int = Field(DEFAULT_MAX_SEQUENCES, ge=1)
    max_embedding_inputs: int = Field(DEFAULT_MAX_EMBEDDING_INPUTS, ge=1)
    max_output_tokens: int | None = Field(None, ge=1)  # caps what a request may ask for; None: the model's length


class RouterSettings(_Frozen):
    """The router deployment."""

    replicas: int = Field(1, ge=1, le=64)
    cpus: float = Field(0.0, ge=0)


# What is served when nothing is configured; float32, since a model this small computes no faster in less.
BUILT_IN = ModelSettings(name="tiny", path="tiny", dtype="float32", tool_parser="hermes")


class Settings(_Frozen):
    """The whole configuration."""

    models: tuple[ModelSettings, ...] = (BUILT_IN,)
    auth: AuthSettings = AuthSettings()
    admission: AdmissionSettings = AdmissionSettings()
    http: HttpSettings = HttpSettings()
    router: RouterSettings = RouterSettings()

    @model_validator(mode="after")
    def _distinct_models(self) -> Settings:
        if not self.models:
            raise ValueError("models: at least one is needed")
        names = [m.name for m in self.models]
        double = {n for n in names if names.count(n) > 1}
        if double:
            raise ValueError(f"models: the name {sorted(double)[0]!r} is given twice")
        return self


def parse(data: Mapping[str, Any]) -> Settings:
    """Settings from a plain mapping.

    Raises:
        ConfigError: the first thing wrong, with the dotted key in `param`.
    """
    try:
        return Settings.model_validate(dict(data))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "configuration"
        message = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise ConfigError(f"{key}: {message}", param=key) from None


def load(path: str | os.PathLike[str]) -> Settings:
    """Settings from a YAML file; an empty file is all defaults.

    Raises:
        ConfigError: unreadable, not YAML, or wrong; names the file and the key.
    """
    try:
        data = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="config") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}", param="config") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a mapping is wanted at the top, found {type(data).__name__}", param="config")
    try:
        return parse(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from None
