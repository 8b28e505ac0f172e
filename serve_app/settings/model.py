"""The settings of one model: its engine, its size, its replicas.

Invariant: what parses can be placed: ranks, shares of GPUs and sizes fit together, as far as that needs no hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from serve_app.core import batching
from serve_app.core.batching import BatchPolicy, Sizing
from serve_app.core.estimate import LengthRule
from serve_app.core.limits import TokenPrices
from serve_app.settings import presets

DEFAULT_TARGET_ONGOING = 20.0  # requests per replica, waiting ones included; what the field's examples use
DEFAULT_UPSCALE_DELAY_S = 30.0  # a burst that is over by then is not worth an engine's start
DEFAULT_DOWNSCALE_DELAY_S = 120.0  # an engine costs minutes to get back, so a pause between requests keeps it
DEFAULT_LOOK_BACK_S = 5.0  # smooths a few samples; the delays do the rest. Serve's 30 s makes every decision that late
DEFAULT_METRICS_INTERVAL_S = 1.0  # a report is a few hundred bytes; at Serve's 10 s a burst is seen up to 20 s late
DEFAULT_MAX_SURGE_PERCENT = 0  # where all GPUs are in use, a replacement beside the old replica would wait for ever
DEFAULT_MAX_NUM_SEQS = 64  # sequences of a step; twice as many gain 5% on two cores (docs/archive/benchmarks.md)
# Tokens of prompt and output. The figure the field uses, with 64 sequences that are shorter and 16 that are not.
DEFAULT_LONG_FROM_TOKENS = 100
# Of a model's KV tokens, for the sessions of one tenant: half of it is left to requests and to other tenants' sessions,
# however long these are renewed.
DEFAULT_MAX_SESSION_SHARE = 0.5
DEFAULT_MAX_IMAGE_PIXELS = 2**25  # of 8K video, 100 MB decoded; models look at a few megapixels at most
DEFAULT_MAX_AUDIO_S = 600.0  # vLLM's own bound: 38 MB decoded, and 20 requests of a Whisper
DEFAULT_MAX_AUDIO_HZ = 192_000  # of studios; models hear 16,000, and what is above costs resampling
DEFAULT_SESSION_SLOTS = 16  # a quarter of the batch beside it; rows that do not run cost an engine step nothing
GB = (
    10**9
)  # the unit of every setting and field that ends in `_gb`, as of devices, of sessions and of `serve-app quota`
DEFAULT_KV_CACHE_GB = 0.54  # CPU only, where the engine cannot measure what is free: 64 tiny sequences of 2,048 tokens
DEFAULT_HEALTH_STALL_S = 8.0  # above a step of a big prefill; two of Serve's checks, so a freeze is seen within 12 s
# A child compiles it, then the engine, and its first masks may take 0.25 s: 2 s in all. With 128,000 tokens to choose
# from an ordinary schema takes 0.1 s, one with a string of bounded length up to 1 s on a busy virtual core.
DEFAULT_GRAMMAR_CPU_S = 0.85
DEFAULT_DRAIN_S = 600.0  # Serve kills streams that outlast it; the longest answer we promise takes minutes

# What no machine or cluster has: above these a number is a mistake, as `1e300` seconds or a billion replicas are.
MAX_REPLICAS = 10_000
MAX_CPUS = 4096
MAX_SECONDS = 30 * 86_400.0
MAX_GB = 1_000_000.0
MAX_COUNT = 10**12  # of tokens, requests and bytes
MAX_PRICE = 1e9
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
MAX_SEED = 2**63 - 1  # a signed integer of 64 bits

ClassName = Literal["low", "normal", "high", "critical"]

# Of vLLM's arguments those that say how many ranks there are and who starts them: Ray places what the settings say.
PLACED_BY_US = {
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
    "data_parallel_backend",
    "distributed_executor_backend",
    "nnodes",
}


def _kinds(annotation: Any) -> set[Any]:
    """The types that a field takes: `int | None` takes two."""
    return set(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else {annotation}


class FrozenSettings(BaseModel):
    """What every part of the configuration is: it never changes, an unknown key in it is an error, and so is a number
    that is none: infinite, or `true`, which Python counts as 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool):
            kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
            if kinds & {int, float}:
                raise ValueError(f"{str(value).lower()} is no {'whole ' if int in kinds else ''}number")
        return value


PolicyName = Literal["ongoing", "slo", "predictive"]  # the keys of `autoscaling.policies.POLICIES`
DEFAULT_POLICY: Final = "ongoing"


class AutoscaleSettings(FrozenSettings):
    """Replica bounds, and what scales between them on Serve. `policy`: that decides; `advise`: one that says what it
    would do, and changes nothing (both: `autoscaling.policies`)."""

    min_replicas: int = Field(1, ge=0, le=MAX_REPLICAS)
    max_replicas: int = Field(1, ge=1, le=MAX_REPLICAS)
    initial_replicas: int | None = Field(None, ge=0, le=MAX_REPLICAS)  # of a model that is new; None: min_replicas
    policy: PolicyName = DEFAULT_POLICY
    advise: PolicyName | None = None
    target_ongoing_requests: float = Field(DEFAULT_TARGET_ONGOING, gt=0, le=MAX_COUNT)
    # Rows of batches count like other requests; else they use what is idle, and keep one replica.
    count_batch_rows: bool = False
    upscale_delay_s: float = Field(DEFAULT_UPSCALE_DELAY_S, ge=0, le=MAX_SECONDS)
    downscale_delay_s: float = Field(DEFAULT_DOWNSCALE_DELAY_S, ge=0, le=MAX_SECONDS)
    # Of the last replica; None: downscale_delay_s.
    downscale_to_zero_delay_s: float | None = Field(None, ge=0, le=MAX_SECONDS)
    look_back_s: float = Field(DEFAULT_LOOK_BACK_S, gt=0, le=MAX_SECONDS)
    metrics_interval_s: float = Field(DEFAULT_METRICS_INTERVAL_S, gt=0, le=MAX_SECONDS)
    # Replicas above the number, in percent, while changed ones replace the others; 0: the old ones leave first.
    max_surge_percent: int = Field(DEFAULT_MAX_SURGE_PERCENT, ge=0, le=100)

    @property
    def first(self) -> int:
        """Replicas that a new model starts with."""
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas

    @model_validator(mode="after")
    def _ordered(self) -> AutoscaleSettings:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        if self.initial_replicas is not None and not self.min_replicas <= self.initial_replicas <= self.max_replicas:
            raise ValueError(
                f"initial_replicas ({self.initial_replicas}) is not between min_replicas ({self.min_replicas}) and "
                f"max_replicas ({self.max_replicas})"
            )
        if self.advise == self.policy:
            raise ValueError(f"advise names {self.advise!r}, which is the policy that decides")
        if self.look_back_s <= self.metrics_interval_s:
            raise ValueError(
                f"look_back_s ({self.look_back_s:g}) must be above metrics_interval_s ({self.metrics_interval_s:g})"
            )
        return self

    def counts(self, *, is_row: bool) -> bool:
        """Whether a request counts for the number of replicas. `is_row`: it is a row of a batch."""
        return self.count_batch_rows or not is_row

    @property
    def autoscaled(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.min_replicas != self.max_replicas


class ScriptedCall(FrozenSettings):
    """A call of a tool that a simulated engine plays."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any] = {}


class ScriptedTurn(FrozenSettings):
    """An answer that a simulated engine plays: thoughts, then text, then calls of tools."""

    reasoning: str | None = None
    text: str | None = None
    calls: tuple[ScriptedCall, ...] = ()

    @model_validator(mode="after")
    def _says_something(self) -> ScriptedTurn:
        if not (self.reasoning or self.text or self.calls):
            raise ValueError("a turn needs `reasoning`, `text` or `calls`")
        return self


class SimulatedSettings(FrozenSettings):
    """Rates of the simulated engine (tests and load studies; never what `make serve` runs)."""

    prefill_tokens_per_s: float = Field(20_000.0, gt=0, le=MAX_COUNT)
    decode_step_s: float = Field(0.02, ge=0, le=MAX_SECONDS)
    kv_cache_tokens: int = Field(65_536, ge=16, le=MAX_COUNT)
    start_s: float = Field(0.0, ge=0, le=MAX_SECONDS)  # what loading a model would take
    seed: int = Field(0, ge=0, le=MAX_SEED)
    script: tuple[ScriptedTurn, ...] = ()  # its answers in a conversation, one after the other; empty: noise

    @field_validator("script")
    @classmethod
    def _answers_without_tools(cls, script: tuple[ScriptedTurn, ...]) -> tuple[ScriptedTurn, ...]:
        if script and all(turn.calls for turn in script):
            raise ValueError("one turn at least must have no calls: some requests have no tools")
        return script


class PriceSettings(FrozenSettings):
    """What a million tokens cost, in any one currency: for reports of use, and budgets."""

    prompt_per_million: float = Field(0.0, ge=0, le=MAX_PRICE)
    cached_per_million: float | None = Field(None, ge=0, le=MAX_PRICE)  # of cached prompt tokens; None: the same
    output_per_million: float = Field(0.0, ge=0, le=MAX_PRICE)

    def token_prices(self) -> TokenPrices:
        """The same for the core."""
        return TokenPrices(self.prompt_per_million, self.cached_per_million, self.output_per_million)


class BatchingSettings(FrozenSettings):
    """How requests are batched before the engine: a preset of `core.batching`, and figures over the preset's own."""

    preset: str | None = None  # a name alone, in place of these settings, is the same
    max_size: int | None = Field(None, ge=1, le=MAX_COUNT)
    max_wait_s: float | None = Field(None, ge=0, le=MAX_SECONDS)
    max_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    counts_output: bool | None = None
    by_length: bool | None = None
    sizing: Sizing | None = None
    long_size: int | None = Field(None, ge=1, le=MAX_COUNT)
    long_from_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    max_queued: int | None = Field(None, ge=1, le=MAX_COUNT)

    @field_validator("preset")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in batching.PRESETS:
            raise ValueError(f"{name!r} is none of {', '.join(batching.PRESETS)}")
        return name

    @model_validator(mode="after")
    def _possible(self) -> BatchingSettings:
        if self.preset is None and self.max_size is None:
            raise ValueError("set a preset or max_size")
        self.policy()
        return self

    def policy(self) -> BatchPolicy:
        """The same for the core."""
        figures = self.model_dump(exclude={"preset", "long_from_tokens"}, exclude_none=True)
        if self.long_from_tokens is not None:
            figures["long_from"] = self.long_from_tokens
        return BatchPolicy(**figures) if self.preset is None else replace(batching.PRESETS[self.preset], **figures)


class ModelSettings(FrozenSettings):
    """One model: an engine deployment of its own."""

    name: Annotated[str, Field(pattern=MODEL_NAME, max_length=200)]
    path: str = Field("tiny", min_length=1)  # "tiny" is the built-in model; else a Hugging Face id or a folder
    # Raised, replicas are replaced with all else unchanged: new weights in the folder.
    generation: int = Field(0, ge=0, le=MAX_COUNT)
    engine: Literal["vllm", "simulated"] = "vllm"
    task: Literal["generate", "embed", "classify", "transcribe"] = "generate"
    max_image_pixels: int = Field(DEFAULT_MAX_IMAGE_PIXELS, ge=1, le=MAX_COUNT)  # of each, before it is decoded
    # Of a file that is transcribed, before it is decoded: its seconds, and its samples in one of them.
    max_audio_s: float = Field(DEFAULT_MAX_AUDIO_S, gt=0, le=MAX_SECONDS)
    max_audio_hz: int = Field(DEFAULT_MAX_AUDIO_HZ, ge=1, le=MAX_COUNT)
    # Defaults of other settings: serve_app.settings.presets.
    preset: Literal["latency", "balanced", "throughput"] | None = None
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    pipeline_parallel_size: int = Field(1, ge=1, le=64)
    replicas: AutoscaleSettings = AutoscaleSettings()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: str | None = None
    max_model_len: int | None = Field(None, ge=16, le=MAX_COUNT)
    max_num_seqs: int = Field(DEFAULT_MAX_NUM_SEQS, ge=1, le=4096)
    # So many of them at most may be long, by estimate, and in a mixture fewer of either; None: length does not count.
    max_long_seqs: int | None = Field(None, ge=1, le=MAX_COUNT)
    long_from_tokens: int = Field(DEFAULT_LONG_FROM_TOKENS, ge=1, le=MAX_COUNT)
    batching: BatchingSettings | None = None  # of requests, before the engine; None: the engine's own alone
    # Sequences the engine runs beside those, for requests of agent sessions alone: as many sessions may be open on it.
    session_slots: int = Field(DEFAULT_SESSION_SLOTS, ge=0, le=1024)
    # The part of the model's KV tokens that agent sessions of one tenant may hold.
    max_session_share: float = Field(DEFAULT_MAX_SESSION_SHARE, gt=0, le=1)
    # Sizes over all ranks that a session's memory is rounded up to, above the largest to its multiples; none: as asked.
    buckets_gb: tuple[Annotated[float, Field(gt=0, le=MAX_GB)], ...] = ()
    max_num_batched_tokens: int | None = Field(None, ge=16, le=MAX_COUNT)
    kv_cache_gb: float | None = Field(None, gt=0, le=MAX_GB)  # per rank; None: sized by gpu_memory_utilization on GPUs
    # Per rank, with which it starts, too; None: with no less.
    kv_cache_min_gb: float | None = Field(None, gt=0, le=MAX_GB)
    # Per rank, weights and KV cache and all; None: from the other settings.
    memory_gb: float | None = Field(None, gt=0, le=MAX_GB)
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    tool_parser: str | None = None
    # Calls that `tool_choice` demands satisfy the tool's schema, `strict` or not: clients parse them as if they did.
    tool_strict: bool = True
    reasoning_parser: str | None = None
    chat_template: str | None = Field(None, min_length=1)
    media_domains: tuple[str, ...] = ()  # hosts that images in requests may be fetched from; none: none
    cpus_per_rank: float = Field(1.0, ge=0, le=MAX_CPUS)
    gpus_per_rank: float | None = Field(None, ge=0, le=1)  # None: 1 for vLLM's GPU build, else no GPU is asked for
    accelerator_type: str | None = None
    # To compile a schema, a regex, a grammar or choices.
    grammar_cpu_s: float = Field(DEFAULT_GRAMMAR_CPU_S, gt=0, le=MAX_SECONDS)
    health_stall_s: float = Field(DEFAULT_HEALTH_STALL_S, gt=0, le=MAX_SECONDS)
    drain_s: float = Field(DEFAULT_DRAIN_S, gt=0, le=MAX_SECONDS)
    prices: PriceSettings | None = None
    extra_engine_args: dict[str, Any] = {}  # passed to vLLM's AsyncEngineArgs as they are
    simulated: SimulatedSettings = SimulatedSettings()

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return presets.with_preset(data) if isinstance(data, Mapping) else data

    @field_validator("batching", mode="before")
    @classmethod
    def _batching_preset(cls, given: Any) -> Any:
        return {"preset": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _can_fill(self) -> ModelSettings:
        policy = self.batch_policy
        if policy is None or policy.is_continuous or policy.max_wait_s is not None:
            return self
        if policy.max_size > self.max_num_seqs:
            raise ValueError(
                f"batching: a batch of {policy.max_size} that waits until it is full needs as many max_num_seqs, "
                f"which are {self.max_num_seqs}; or set max_wait_s"
            )
        return self

    @model_validator(mode="after")
    def _placeable(self) -> ModelSettings:
        if self.ranks > 1 and self.gpus_per_rank not in (None, 0, 1):
            raise ValueError(
                f"gpus_per_rank ({self.gpus_per_rank:g}) must be 1 where an engine has several ranks: "
                "shares of a GPU can land on the same GPU, where two ranks of one engine cannot run"
            )
        wanted_gb = self.kv_cache_gb
        least_gb = self.kv_cache_min_gb
        if wanted_gb is not None and least_gb is not None and least_gb > wanted_gb:
            raise ValueError(f"kv_cache_min_gb ({least_gb:g}) is above kv_cache_gb ({wanted_gb:g})")
        if self.max_long_seqs is not None and self.max_long_seqs > self.max_num_seqs:
            raise ValueError(f"max_long_seqs ({self.max_long_seqs}) is above max_num_seqs ({self.max_num_seqs})")
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.engine_seqs and self.engine == "vllm":
            raise ValueError(
                f"max_num_batched_tokens ({budget}) is below the {self.engine_seqs} sequences of a step "
                "(max_num_seqs and session_slots): each needs a token of it"
            )
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
    def gpus(self) -> float:
        """GPUs of a replica, where machines have some."""
        usual = 1.0 if self.engine == "vllm" else 0.0
        return self.ranks * (usual if self.gpus_per_rank is None else self.gpus_per_rank)

    @property
    def effective_session_slots(self) -> int:
        """Sequences kept for sessions; a pooling model has none: nothing of its requests stays in the cache."""
        return self.session_slots if self.task == "generate" else 0

    @property
    def batch_policy(self) -> BatchPolicy | None:
        """How batches are formed before the engine; None: they are not."""
        return None if self.batching is None else self.batching.policy()

    @property
    def length_rule(self) -> LengthRule | None:
        """What a request takes of the batch by its length; None: all the same."""
        if self.max_long_seqs is None:
            return None
        return LengthRule.of_batch(self.max_num_seqs, self.max_long_seqs, self.long_from_tokens)

    @property
    def engine_seqs(self) -> int:
        """Sequences one step of the engine runs: those the routers grant, and those of sessions."""
        return self.max_num_seqs + self.effective_session_slots


# What is served when nothing is configured; float32, since a model this small computes no faster in less.
BUILT_IN_MODEL = ModelSettings(name="tiny", path="tiny", dtype="float32", tool_parser="hermes")
