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
from serve_app.names import deployment_of
from serve_app.types import RequestClass

DEFAULT_MAX_BODY_BYTES = 8 * 2**20  # a 128K-token prompt is about 0.6 MB; vision inputs are links or a few MB
DEFAULT_MAX_JSON_DEPTH = 64  # nested JSON schemas of real tools stay under 20; parsers recurse per level
DEFAULT_MAX_SEQUENCES = 8  # per request: n x prompts; vLLM's own default of 16384 lets one call fill the engine
DEFAULT_MAX_EMBEDDING_INPUTS = 2048  # OpenAI's own bound on the inputs of one embeddings call
DEFAULT_MAX_QUEUED = 1000  # requests waiting per model; the middle size the field uses (256, 1,000, 10,000)
DEFAULT_MAX_WAIT_S = 60.0  # above the slowest first token we promise anyone
DEFAULT_NO_REPLICA_WAIT_S = 60.0  # a crashed replica of a small model is back in less; raise it for slow loads
DEFAULT_TARGET_ONGOING = 20.0  # requests per replica, waiting ones included; what the field's examples use
DEFAULT_UPSCALE_DELAY_S = 30.0  # a burst that is over by then is not worth an engine's start
DEFAULT_DOWNSCALE_DELAY_S = 120.0  # an engine costs minutes to get back, so a pause between requests keeps it
DEFAULT_LOOK_BACK_S = 5.0  # smooths a few samples; the delays do the rest. Serve's 30 s makes every decision that late
DEFAULT_METRICS_INTERVAL_S = 1.0  # a report is a few hundred bytes; at Serve's 10 s a burst is seen up to 20 s late
DEFAULT_MAX_SURGE_PERCENT = 0  # where all GPUs are in use, a replacement beside the old replica would wait for ever
DEFAULT_MAX_NUM_SEQS = 64  # sequences one engine step runs; the knee of the batch curve on two cores
DEFAULT_SESSION_SLOTS = 16  # a quarter of the batch beside it; rows that do not run cost an engine step nothing
DEFAULT_SESSIONS_PER_TENANT = 64  # as many agents as one model's batch; a runaway script does not take every engine
DEFAULT_KV_CACHE_GB = 0.5  # CPU only, where the engine cannot measure what is free: 0.5 GiB holds 64 tiny sequences
DEFAULT_MEMORY_WAIT_S = 3600.0  # an engine waits for its memory this long; it is seen to wait, and costs no restart
DEFAULT_HEALTH_STALL_S = 30.0  # a step of a big prefill takes seconds; 30 s without CPU time or a step is frozen
DEFAULT_DRAIN_S = 600.0  # Serve kills streams that outlast it; the longest answer we promise takes minutes

# Of vLLM's arguments those that say how many ranks there are and who starts them: Ray places what the settings say.
PLACED_BY_US = frozenset(
    {
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "data_parallel_size",
        "data_parallel_backend",
        "distributed_executor_backend",
        "nnodes",
    }
)

ClassName = Literal["low", "normal", "high", "critical"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AutoscaleSettings(_Frozen):
    """Replica bounds and Serve's autoscaling on ongoing requests per replica."""

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: float = Field(DEFAULT_TARGET_ONGOING, gt=0)
    upscale_delay_s: float = Field(DEFAULT_UPSCALE_DELAY_S, ge=0)
    downscale_delay_s: float = Field(DEFAULT_DOWNSCALE_DELAY_S, ge=0)
    downscale_to_zero_delay_s: float | None = Field(None, ge=0)  # of the last replica; None: downscale_delay_s
    look_back_s: float = Field(DEFAULT_LOOK_BACK_S, gt=0)
    metrics_interval_s: float = Field(DEFAULT_METRICS_INTERVAL_S, gt=0)
    # Replicas above the number, in percent, while changed ones replace the others; 0: the old ones leave first.
    max_surge_percent: int = Field(DEFAULT_MAX_SURGE_PERCENT, ge=0, le=100)

    @model_validator(mode="after")
    def _ordered(self) -> AutoscaleSettings:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        if self.look_back_s <= self.metrics_interval_s:
            raise ValueError(
                f"look_back_s ({self.look_back_s:g}) must be above metrics_interval_s ({self.metrics_interval_s:g})"
            )
        return self

    @property
    def autoscaled(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.min_replicas != self.max_replicas


class SimulatedSettings(_Frozen):
    """Rates of the simulated engine (tests and load studies; never what `make serve` runs)."""

    prefill_tokens_per_s: float = Field(20_000.0, gt=0)
    decode_step_s: float = Field(0.02, ge=0)
    kv_cache_tokens: int = Field(65_536, ge=16)
    start_s: float = Field(0.0, ge=0)  # what loading a model would take
    seed: int = 0


class ModelSettings(_Frozen):
    """One model: an engine deployment of its own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=200)]
    path: str = "tiny"  # "tiny" is the built-in model; else a Hugging Face id or a folder
    generation: int = Field(0, ge=0)  # raised, replicas are replaced with all else unchanged: new weights in the folder
    engine: Literal["vllm", "simulated"] = "vllm"
    task: Literal["generate", "embed"] = "generate"
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    pipeline_parallel_size: int = Field(1, ge=1, le=64)
    replicas: AutoscaleSettings = AutoscaleSettings()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: str | None = None
    max_model_len: int | None = Field(None, ge=16)
    max_num_seqs: int = Field(DEFAULT_MAX_NUM_SEQS, ge=1, le=4096)
    # Sequences the engine runs beside those, for requests of agent sessions alone: as many sessions may be open on it.
    session_slots: int = Field(DEFAULT_SESSION_SLOTS, ge=0, le=1024)
    # Sizes over all ranks that a session's memory is rounded up to, above the largest to its multiples; none: as asked.
    buckets_gb: tuple[Annotated[float, Field(gt=0)], ...] = ()
    max_num_batched_tokens: int | None = Field(None, ge=16)
    kv_cache_gb: float | None = Field(None, gt=0)  # per rank; None: sized by gpu_memory_utilization on GPUs
    kv_cache_min_gb: float | None = Field(None, gt=0)  # per rank, with which it starts, too; None: with no less
    memory_gb: float | None = Field(None, gt=0)  # per rank, weights and KV cache and all; None: from the other settings
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None
    media_domains: tuple[str, ...] = ()  # hosts that images in requests may be fetched from; none: none
    cpus_per_rank: float = Field(1.0, ge=0)
    gpus_per_rank: float | None = Field(None, ge=0, le=1)  # None: 1 for vLLM's GPU build, else no GPU is asked for
    accelerator_type: str | None = None
    health_stall_s: float = Field(DEFAULT_HEALTH_STALL_S, gt=0)
    drain_s: float = Field(DEFAULT_DRAIN_S, gt=0)
    extra_engine_args: dict[str, Any] = {}  # passed to vLLM's AsyncEngineArgs as they are
    simulated: SimulatedSettings = SimulatedSettings()

    @model_validator(mode="after")
    def _placeable(self) -> ModelSettings:
        if self.ranks > 1 and self.gpus_per_rank not in (None, 0, 1):
            raise ValueError(
                f"gpus_per_rank ({self.gpus_per_rank:g}) must be 1 where an engine has several ranks: "
                "shares of a GPU can land on the same GPU, where two ranks of one engine cannot run"
            )
        wanted_gb, least_gb = self.kv_cache_gb, self.kv_cache_min_gb
        if wanted_gb is not None and least_gb is not None and least_gb > wanted_gb:
            raise ValueError(f"kv_cache_min_gb ({least_gb:g}) is above kv_cache_gb ({wanted_gb:g})")
        if list(self.buckets_gb) != sorted(set(self.buckets_gb)):
            raise ValueError("buckets_gb: sizes must rise")
        placed = sorted(PLACED_BY_US & self.extra_engine_args.keys())
        if placed:
            raise ValueError(f"extra_engine_args: {placed[0]} decides where ranks run, which the model's settings do")
        return self

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def placed_by_ledger(self) -> bool:
        """Whether the ledger may choose the node of its engines: it shares a device, or says what memory it needs."""
        return self.memory_gb is not None or 0 < (self.gpus_per_rank or 0) < 1

    @property
    def session_places(self) -> int:
        """Sequences kept for sessions; an embedding model has none: nothing of its requests stays in the cache."""
        return self.session_slots if self.task == "generate" else 0

    @property
    def engine_seqs(self) -> int:
        """Sequences one step of the engine runs: those the routers grant, and those of sessions."""
        return self.max_num_seqs + self.session_places


class KeySettings(_Frozen):
    """One API key. Give the key itself, or its SHA-256 (hex) so that the file holds no secret."""

    key: str | None = Field(None, min_length=16)
    key_sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field("default", min_length=1, max_length=64)
    max_class: ClassName = "high"
    default_class: ClassName = "normal"
    admin: bool = False  # may ask what concerns all tenants: /admin/quota

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

    @model_validator(mode="after")
    def _distinct_keys(self) -> AuthSettings:
        """Routers that run take no configuration in which it is not clear whose a key is."""
        digests = [key.without_secret().key_sha256 for key in self.keys]
        for index, digest in enumerate(digests):
            if digest in digests[:index]:
                raise ValueError(f"auth.keys.{index}: this key is given twice")
        return self


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


class QuotaSettings(_Frozen):
    """The ledger of GPU memory. Read when the quota actor starts, which is once in a cluster's life."""

    reserved_gb: float = Field(2.0, ge=0)  # of each GPU, nobody's: the driver's context, NCCL's buffers, CUDA graphs
    host_memory_share: float = Field(0.5, ge=0, lt=1)  # of a node without GPUs: its one "device"
    device_gb: float | None = Field(None, gt=0)  # of each GPU; None: NVML is asked
    wait_s: float = Field(DEFAULT_MEMORY_WAIT_S, gt=0)  # an engine waits so long for memory, then its start fails
    # Fragmentation above which engines drain and restart so that one that waits fits; 0.3 is usual. None: when told to.
    defrag_above: float | None = Field(None, ge=0, lt=1)


class SessionSettings(_Frozen):
    """Agent sessions: KV cache reserved for one agent's requests."""

    per_tenant: int = Field(DEFAULT_SESSIONS_PER_TENANT, ge=0)  # open or waiting, of all models; 0: none at all


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
    quota: QuotaSettings = QuotaSettings()
    sessions: SessionSettings = SessionSettings()

    @model_validator(mode="after")
    def _distinct_models(self) -> Settings:
        if not self.models:
            raise ValueError("models: at least one is needed")
        names = [m.name for m in self.models]
        double = {n for n in names if names.count(n) > 1}
        if double:
            raise ValueError(f"models: the name {sorted(double)[0]!r} is given twice")
        by_deployment = {deployment_of(name): name for name in names}
        for name in names:
            if by_deployment[deployment_of(name)] != name:
                raise ValueError(f"models: {name!r} and {by_deployment[deployment_of(name)]!r} are the same for Serve")
        return self

    @model_validator(mode="after")
    def _first_request_can_wait(self) -> Settings:
        from_zero = [model.name for model in self.models if not model.replicas.min_replicas]
        if from_zero and not self.admission.max_queued:
            raise ValueError(
                f"admission.max_queued is 0: no request could wait for the first replica of {from_zero[0]!r} "
                "(min_replicas 0), and none would ever start"
            )
        return self

    @property
    def autoscaled(self) -> bool:
        """Whether the number of any model's replicas follows its load."""
        return any(model.replicas.autoscaled for model in self.models)

    def without_secrets(self) -> Settings:
        """The same with every key by its SHA-256 alone."""
        keys = tuple(key.without_secret() for key in self.auth.keys)
        return self.model_copy(update={"auth": self.auth.model_copy(update={"keys": keys})})

    def with_key(self, key: str) -> Settings:
        """The same with this one key, made here: its owner is who runs all of it."""
        owner = KeySettings(key=key, admin=True)
        return self.model_copy(update={"auth": self.auth.model_copy(update={"keys": (owner,)})})


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
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}", param="config") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a mapping is wanted at the top, found {type(data).__name__}", param="config")
    try:
        return parse(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from None
