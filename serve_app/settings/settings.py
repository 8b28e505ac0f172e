"""The configuration: one frozen tree, checked before anything is started. Models are in `serve_app.settings.model`.

Invariant: what parses is runnable as far as can be told without the hardware; an unknown key is an error that names it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import AwareDatetime, Field, PrivateAttr, field_validator, model_validator

from serve_app.core.estimate import DEFAULT_QUANTILE
from serve_app.core.limits import Limits
from serve_app.core.queue import (
    DEFAULT_MIN_SHARE,
    DEFAULT_NO_REPLICA_WAIT_S,
    MAX_GUARD_SLOTS_SHARE,
    MAX_WEIGHT,
    MIN_WEIGHT,
    ClassBound,
    QueuePolicy,
    TenantPolicy,
)
from serve_app.core.receipts import ServiceLevel
from serve_app.errors import ConfigError
from serve_app.names import deployment_of
from serve_app.settings.batch import MAX_DAYS, BatchSettings
from serve_app.settings.jwt import JwtSettings
from serve_app.settings.mistakes import FileSource, Mistake, mistakes
from serve_app.settings.model import (
    BUILT_IN_MODEL,
    MAX_COUNT,
    MAX_CPUS,
    MAX_GB,
    MAX_SECONDS,
    ClassName,
    FrozenSettings,
    ModelSettings,
)
from serve_app.settings.routes import RouteSettings, check_routes
from serve_app.settings.variables import Names
from serve_app.types import TOKEN_PREFIX, RequestClass

Origin = Annotated[str, Field(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]+)$")]  # as a browser sends it

DEFAULT_MAX_BODY_BYTES = 8 * 2**20  # a 128K-token prompt is about 0.6 MB; vision inputs are links or a few MB
DEFAULT_MAX_AUDIO_BYTES = 25 * 2**20  # OpenAI's bound: 13 minutes of WAV at 16,000 samples a second, hours of MP3
MAX_AUDIO_BYTES = 200 * 2**20  # a request goes to its engine in one message of 256 MiB at most
DEFAULT_MAX_JSON_VALUES = 250_000  # a prompt of 128K token ids twice over; decoding them holds a router for 15 to 60 ms
DEFAULT_MAX_JSON_DEPTH = 64  # nested JSON schemas of real tools stay under 20; parsers recurse per level
# Per request: n x prompts, each prompt granted by itself. LangChain sends 20 at once; with vLLM's own bound of 16384
# one call fills the queue.
DEFAULT_MAX_SEQUENCES = 128
DEFAULT_MAX_EMBEDDING_INPUTS = 2048  # OpenAI's own bound on the inputs of one embeddings call
DEFAULT_MAX_QUEUED = 1000  # requests waiting per model; the middle size the field uses (256, 1,000, 10,000)
DEFAULT_MAX_QUEUED_TOKENS = 4_000_000  # as many requests of 4,000 tokens; longer ones take minutes each to drain
DEFAULT_GUARD_SLOTS_SHARE = 0.25  # at most; more costs throughput and, beside preemption, gains `high` nothing
DEFAULT_TENANT_WEIGHT = 1.0  # tenants are equal until somebody says otherwise
DEFAULT_MAX_WAIT_S = 60.0  # above the slowest first token we promise anyone
DEFAULT_SESSIONS_PER_TENANT = 64  # as many agents as one model's batch; a runaway script does not take every engine
DEFAULT_SAMPLE_RATIO = 0.01  # of traces; with 10 requests a second 8,640 traces a day, beside the failed and slow ones
DEFAULT_SLOW_S = 10.0  # to the first token; people have given up by then
DEFAULT_NAMED_TENANTS = 20  # with 3 models and 3 routers less than 50,000 series, which a small Prometheus carries
# A year and a month: who asks in January for all of the year before finds it. An entry takes half a kilobyte.
DEFAULT_AUDIT_DAYS = 400
DEFAULT_RESPONSE_KEEP_S = 30 * 86_400  # OpenAI's
DEFAULT_RESPONSE_BYTES = 256 * 2**20  # of a tenant: some 30,000 turns of 2,000 tokens
DEFAULT_RECORD_DAYS = 7.0  # the question of Monday about Friday night
DEFAULT_RECORD_BYTES = 512 * 2**20  # some 900,000 requests: a week with one and a half a second
DEFAULT_MEMORY_WAIT_S = 3600.0  # an engine waits for its memory this long; it is seen to wait, and costs no restart


class LimitSettings(FrozenSettings):
    """What a key, a tenant, or a tenant's use of one model may use; None: no limit."""

    requests_per_minute: float | None = Field(None, gt=0, le=MAX_COUNT)
    tokens_per_minute: float | None = Field(None, gt=0, le=MAX_COUNT)  # prompt and output
    burst_requests: int | None = Field(None, ge=1, le=MAX_COUNT)  # at once after a pause; None: those of a minute
    burst_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    max_concurrent: int | None = Field(None, ge=1, le=MAX_COUNT)  # requests at once
    requests_per_day: int | None = Field(None, ge=1, le=MAX_COUNT)  # of UTC
    tokens_per_day: int | None = Field(None, ge=1, le=MAX_COUNT)
    budget_per_month: float | None = Field(None, gt=0, le=MAX_COUNT)  # in the currency of `models[].prices`

    @model_validator(mode="after")
    def _has_a_rate(self) -> LimitSettings:
        for kind in ("requests", "tokens"):
            burst = getattr(self, f"burst_{kind}")
            rate = getattr(self, f"{kind}_per_minute")
            if burst is not None and rate is None:
                raise ValueError(f"burst_{kind} without {kind}_per_minute: nothing would refill it")
        return self

    def limits(self) -> Limits:
        """The same for the core."""
        return Limits(**self.model_dump())


class KeySettings(FrozenSettings):
    """One API key. Give the key itself, or its SHA-256 (hex) so that the file holds no secret."""

    key: str | None = Field(None, min_length=16, pattern=r"^[!-~]+$")
    key_sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    name: str | None = Field(None, min_length=1, max_length=64)  # in reports; None: of its digest, the first digits
    tenant: str = Field("default", min_length=1, max_length=64)
    max_class: ClassName = "high"
    default_class: ClassName = "normal"
    admin: bool = False  # may ask what concerns all tenants: /admin/quota, /metrics
    metrics: bool = False  # may read /metrics, as an operator's may: for a scraper
    deploy: bool = False  # may deploy by HTTP what `settings.remote_changes` opens; an operator's alone may not
    models: tuple[str, ...] | None = None  # that it may use; None: all, or none with `metrics` and without `admin`
    expires_at: AwareDatetime | None = None  # it is refused from then on; with its offset from UTC
    limits: LimitSettings | None = None  # None: those of `auth.key_limits`
    batch_limits: LimitSettings | None = None  # of the rows of its batches; None: none

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


RENAMED_ADMISSION = {"trickle_share": "min_share", "headroom_share": "guard_slots_share"}  # read for one version


class AuthSettings(FrozenSettings):
    """Who may call. Without keys one is generated at start and kept in `key_file` with mode 0600."""

    keys: tuple[KeySettings, ...] = ()
    key_file: str | None = None
    key_limits: LimitSettings = LimitSettings()  # of every key without its own, and of each subject of a token
    jwt: JwtSettings | None = None  # None: no tokens

    @model_validator(mode="after")
    def _distinct_keys(self) -> AuthSettings:
        """Routers that run take no configuration in which it is not clear whose a key is."""
        digests = [key.without_secret().key_sha256 for key in self.keys]
        for index, digest in enumerate(digests):
            if digest in digests[:index]:
                raise ValueError(f"auth.keys.{index}: this key is given twice")
        names = [key.name for key in self.keys if key.name is not None]
        for index, key in enumerate(self.keys):
            if (key.name or "").startswith(TOKEN_PREFIX):
                raise ValueError(f"auth.keys.{index}.name: {TOKEN_PREFIX} begins the names of tokens' subjects")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"keys: two of them have the name {name!r}, and reports could not tell them apart")
        return self


class ClassSettings(FrozenSettings):
    """Bounds of one class beside those of the whole line (None: only those hold), and what it promises (None: nothing;
    it is measured and told, and refuses nobody)."""

    max_queued: int | None = Field(None, ge=0, le=MAX_COUNT)
    max_queued_tokens: int | None = Field(None, ge=0, le=MAX_COUNT)
    ttft_slo_s: float | None = Field(None, gt=0, le=MAX_SECONDS)  # from arrival to the first token
    itl_slo_s: float | None = Field(None, gt=0, le=MAX_SECONDS)  # between tokens, the mean of an answer


class TenantSettings(FrozenSettings):
    """What one tenant may have of each model's replicas."""

    weight: float = Field(DEFAULT_TENANT_WEIGHT, ge=MIN_WEIGHT, le=MAX_WEIGHT)  # its part of a class
    share: float = Field(0.0, ge=0, le=1)  # of slots and KV tokens, its own as soon as it asks; others may borrow it
    limits: LimitSettings = LimitSettings()  # of all its keys together
    models: dict[str, LimitSettings] = {}  # the same for single models
    batch_limits: LimitSettings = LimitSettings()  # of the rows of its batches, which are in no other limits
    over_limit: Literal["refuse", "wait"] = "refuse"  # a request over a limit: 429 with Retry-After, or it waits aside


class AdmissionSettings(FrozenSettings):
    """The waiting line in front of each model."""

    max_queued: int = Field(DEFAULT_MAX_QUEUED, ge=0, le=MAX_COUNT)
    # Estimated prompt and output; None: any.
    max_queued_tokens: int | None = Field(DEFAULT_MAX_QUEUED_TOKENS, ge=0, le=MAX_COUNT)
    classes: dict[ClassName, ClassSettings] = {}
    tenants: dict[Annotated[str, Field(min_length=1, max_length=64)], TenantSettings] = {}
    min_share: float = Field(DEFAULT_MIN_SHARE, ge=0, le=0.25)  # of granted tokens, for each class that waits
    # Of all slots, at most, kept free for `high` and `critical` while these come.
    guard_slots_share: float = Field(DEFAULT_GUARD_SLOTS_SHARE, ge=0, le=MAX_GUARD_SLOTS_SHARE)
    max_wait_s: float = Field(DEFAULT_MAX_WAIT_S, gt=0, le=MAX_SECONDS)
    no_replica_wait_s: float = Field(DEFAULT_NO_REPLICA_WAIT_S, gt=0, le=MAX_SECONDS)
    # Of answers like it: what a request is given. By default one request in five outgrows it and is given more; on chat
    # traces no more than what the pool keeps for that.
    output_quantile: float = Field(DEFAULT_QUANTILE, gt=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, given: Any) -> Any:
        """Take settings under the names they had before."""
        if not isinstance(given, Mapping):
            return given
        settings = dict(given)
        for old, new in RENAMED_ADMISSION.items():
            if old not in settings:
                continue
            if new in settings:
                raise ValueError(f"{old}: is called {new} now, and both are given")
            settings[new] = settings.pop(old)
            warnings.warn(
                f"admission.{old} is called admission.{new} now; the old name goes with the next version",
                FutureWarning,
                stacklevel=2,
            )
        return settings

    @model_validator(mode="after")
    def _shares_exist(self) -> AdmissionSettings:
        shares = sum(tenant.share for tenant in self.tenants.values())
        if shares > 1 + 1e-9:
            raise ValueError(f"tenants: their shares are {shares:g} in sum, more than there is")
        return self

    @property
    def service_levels(self) -> dict[RequestClass, ServiceLevel]:
        """Of the classes that promise something."""
        return {
            RequestClass[name.upper()]: ServiceLevel(one.ttft_slo_s, one.itl_slo_s)
            for name, one in self.classes.items()
            if one.ttft_slo_s is not None or one.itl_slo_s is not None
        }

    def queue_policy(self) -> QueuePolicy:
        """The same for the core: bounds and shares of each model's queue."""
        return QueuePolicy(
            max_queued=self.max_queued,
            max_wait_s=self.max_wait_s,
            no_replica_wait_s=self.no_replica_wait_s,
            max_queued_tokens=self.max_queued_tokens,
            classes={
                RequestClass[name.upper()]: ClassBound(bound.max_queued, bound.max_queued_tokens)
                for name, bound in self.classes.items()
            },
            tenants={name: TenantPolicy(tenant.weight, tenant.share) for name, tenant in self.tenants.items()},
            min_share=self.min_share,
            guard_slots_share=self.guard_slots_share,
        )


class TlsSettings(FrozenSettings):
    """PEM files of the endpoint: the certificate with its chain, its key without a password."""

    certificate: str = Field(min_length=1)
    key: str = Field(min_length=1)


class HttpSettings(FrozenSettings):
    """Bounds of the public endpoint."""

    max_body_bytes: int = Field(DEFAULT_MAX_BODY_BYTES, ge=1024, le=MAX_COUNT)
    max_audio_bytes: int = Field(DEFAULT_MAX_AUDIO_BYTES, ge=1024, le=MAX_AUDIO_BYTES)  # of a file that is transcribed
    max_json_depth: int = Field(DEFAULT_MAX_JSON_DEPTH, ge=4, le=512)
    # Objects and arrays count, beside what is in them.
    max_json_values: int = Field(DEFAULT_MAX_JSON_VALUES, ge=1024, le=MAX_COUNT)
    max_sequences: int = Field(DEFAULT_MAX_SEQUENCES, ge=1, le=MAX_COUNT)
    max_embedding_inputs: int = Field(DEFAULT_MAX_EMBEDDING_INPUTS, ge=1, le=MAX_COUNT)
    # Caps what a request may ask for; None: the model's length.
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    # Of a request that names no bound; None: what is left.
    default_output_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    cors_origins: tuple[
        Origin, ...
    ] = ()  # of web pages that may call; a key in a web page is public, so none by default
    console: bool = True  # whether /console is there
    tls: TlsSettings | None = None  # read by `serve-app up`; on a cluster the environment of each machine says it


class QuotaSettings(FrozenSettings):
    """The ledger of GPU memory. Read when the quota actor starts, which is once in a cluster's life."""

    # Of each GPU, nobody's: the driver's context, NCCL's buffers, CUDA graphs.
    reserved_gb: float = Field(2.0, ge=0, le=MAX_GB)
    host_memory_share: float = Field(0.5, ge=0, lt=1)  # of a node without GPUs: its one "device"
    device_gb: float | None = Field(None, gt=0, le=MAX_GB)  # of each GPU; None: NVML is asked
    # An engine waits so long for memory, then its start fails.
    wait_s: float = Field(DEFAULT_MEMORY_WAIT_S, gt=0, le=MAX_SECONDS)
    # Fragmentation above which engines drain and restart so that one that waits fits; 0.3 is usual. None: when told to.
    defrag_above: float | None = Field(None, ge=0, lt=1)


class SessionSettings(FrozenSettings):
    """Agent sessions: KV cache reserved for one agent's requests."""

    # Open or waiting, of all models; 0: none at all.
    per_tenant: int = Field(DEFAULT_SESSIONS_PER_TENANT, ge=0, le=MAX_COUNT)


class MetricsSettings(FrozenSettings):
    """The metrics of the routers."""

    # By most use; all others are counted as `other`. Each costs some 80 samples for each model, class and router.
    named_tenants: int = Field(DEFAULT_NAMED_TENANTS, ge=0, le=1000)


POSTGRES_DRIVER = "postgresql+psycopg"  # SQLAlchemy's name of the driver that is installed with this package


class StoreSettings(FrozenSettings):
    """The database of keys and of use."""

    url: str | None = Field(None, min_length=1)  # SQLAlchemy's; None: a SQLite file on the head node
    audit_days: float = Field(DEFAULT_AUDIT_DAYS, ge=1, le=MAX_DAYS)  # entries of the audit record are kept so long

    @field_validator("url")
    @classmethod
    def _reachable(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parsed = urlsplit(url)
        _ = parsed.port  # raises ValueError for what is none
        if parsed.scheme not in ("postgresql", POSTGRES_DRIVER, "sqlite"):
            raise ValueError(f"must begin with postgresql:, {POSTGRES_DRIVER}: or sqlite:")
        if parsed.scheme == "sqlite" and not parsed.path.startswith("//"):
            raise ValueError("must name the file on the head node by its full path: sqlite:////its/path")
        if parsed.password is not None or "password=" in parsed.query:
            raise ValueError(
                "must hold no password, since whoever may look at Serve sees the configuration: "
                "put it into PGPASSWORD or a PGPASSFILE on every node, as PostgreSQL's own programs read it"
            )
        return url


class ResponseSettings(FrozenSettings):
    """Responses that are kept, so that a later one can continue them."""

    store_by_default: bool = False  # what a request without `store` asks for; at OpenAI it is true
    # From the newest turn of a conversation.
    keep_s: float = Field(DEFAULT_RESPONSE_KEEP_S, gt=0, le=MAX_DAYS * 86_400)
    # The oldest make room.
    max_bytes_per_tenant: int = Field(DEFAULT_RESPONSE_BYTES, ge=2**16, le=MAX_COUNT)


class TraceSettings(FrozenSettings):
    """Spans of requests, for a collector that speaks OpenTelemetry's protocol (OTLP) over HTTP."""

    endpoint: str | None = Field(None, min_length=1)  # without `/v1/traces`; None: no traces
    # Of the traces that no caller has decided about. Those of failed and slow requests are always sent.
    sample_ratio: float = Field(DEFAULT_SAMPLE_RATIO, ge=0, le=1)
    slow_s: float = Field(DEFAULT_SLOW_S, gt=0, le=MAX_SECONDS)  # to the first token, or to the end without one

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        parsed = urlsplit(endpoint)
        _ = parsed.port  # raises ValueError for what is none
        if parsed.scheme not in ("http", "https") or not parsed.hostname or parsed.query or parsed.fragment:
            raise ValueError("must be the address of a collector, such as http://collector:4318")
        if parsed.username is not None:
            raise ValueError(
                "must hold no password, since whoever may look at Serve sees the configuration: "
                "put it into OTEL_EXPORTER_OTLP_HEADERS on every node"
            )
        return endpoint


class LogSettings(FrozenSettings):
    """The logs of all processes."""

    # Read by `serve-app up`; on a cluster the environment of each machine says it.
    format: Literal["text", "json"] = "text"
    prompts: bool = False  # routers write the prompt of each request to their log; never in a support bundle


class RecordSettings(FrozenSettings):
    """The request log on the disk of each node with a router."""

    keep_days: float = Field(DEFAULT_RECORD_DAYS, ge=0, le=MAX_DAYS)  # 0: no log and no history
    # Of a node. What failed by an engine or by this system is removed last.
    max_bytes: int = Field(DEFAULT_RECORD_BYTES, ge=2**20, le=2**40)


class ScalingSettings(FrozenSettings):
    """Scaling of all models together."""

    max_gpus: float | None = Field(None, gt=0, le=MAX_COUNT)  # of all replicas; None: no bound
    record_decisions: bool = False  # with all that they are made of, on the head node


class RouterSettings(FrozenSettings):
    """The router deployment."""

    replicas: int = Field(1, ge=1, le=64)
    cpus: float = Field(0.0, ge=0, le=MAX_CPUS)


class Settings(FrozenSettings):
    """The whole configuration."""

    models: tuple[ModelSettings, ...] = (BUILT_IN_MODEL,)
    routes: tuple[RouteSettings, ...] = ()
    auth: AuthSettings = AuthSettings()
    admission: AdmissionSettings = AdmissionSettings()
    http: HttpSettings = HttpSettings()
    router: RouterSettings = RouterSettings()
    scaling: ScalingSettings = ScalingSettings()
    quota: QuotaSettings = QuotaSettings()
    sessions: SessionSettings = SessionSettings()
    store: StoreSettings = StoreSettings()
    batch: BatchSettings = BatchSettings()
    responses: ResponseSettings = ResponseSettings()
    traces: TraceSettings = TraceSettings()
    metrics: MetricsSettings = MetricsSettings()
    logs: LogSettings = LogSettings()
    records: RecordSettings = RecordSettings()
    _names: Names = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _servable(self) -> Settings:
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
        check_routes(self.routes, names)
        least = sum(model.replicas.min_replicas * model.gpus for model in self.models)
        if self.scaling.max_gpus is not None and least > self.scaling.max_gpus:
            raise ValueError(
                f"scaling.max_gpus is {self.scaling.max_gpus:g}, and min_replicas of all models take {least:g} GPUs"
            )
        from_zero = [model.name for model in self.models if not model.replicas.min_replicas]
        if from_zero and not self.admission.max_queued:
            raise ValueError(
                f"admission.max_queued is 0: no request could wait for the first replica of {from_zero[0]!r} "
                "(min_replicas 0), and none would ever start"
            )
        return self

    def without_secrets(self) -> Settings:
        """The same with every key by its SHA-256 alone. Keys that were not given stay not given."""
        if "keys" not in self.auth.model_fields_set:
            return self
        keys = tuple(key.without_secret() for key in self.auth.keys)
        return self.model_copy(update={"auth": self.auth.model_copy(update={"keys": keys})})

    @property
    def names(self) -> Names:
        """The scalars that came from variables, as the file has them."""
        return self._names

    def with_names(self, names: Names) -> Settings:
        """The same, some scalars of which came from variables."""
        other = self.model_copy()
        other._names = names
        return other

    def with_key(self, key: str) -> Settings:
        """The same with this one key, made here: its owner is who runs all of it, and may claim every class."""
        owner = KeySettings(key=key, admin=True, max_class="critical")
        return self.model_copy(update={"auth": self.auth.model_copy(update={"keys": (owner,)})})


def parse(data: Mapping[str, Any]) -> Settings:
    """Settings from a plain mapping.

    Raises:
        ConfigError: the first thing wrong, with the dotted key in `param`.
    """
    settings, wrong = examine(data)
    return or_first(settings, wrong)


def examine(data: Mapping[str, Any], source: FileSource | None = None) -> tuple[Settings | None, list[Mistake]]:
    """Settings from a plain mapping, or None and everything that is wrong with it. `source`: the file it is of."""
    try:
        return Settings.model_validate(dict(data)), []
    except pydantic.ValidationError as error:
        return None, mistakes(error, Settings, source)


def or_first(settings: Settings | None, wrong: Sequence[Mistake]) -> Settings:
    """The settings. Raises ConfigError: there are none, but mistakes; it has the first."""
    if settings is None:
        more = f" (and {len(wrong) - 1} more: `serve-app check` tells all)" if len(wrong) > 1 else ""
        raise ConfigError(f"{wrong[0].path}: {wrong[0].located}{more}", param=wrong[0].path)
    return settings
