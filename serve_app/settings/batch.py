"""The settings of the batch lane: its workers, its bounds, where its files are, and its intake from Redis Streams.

Invariant: a URL here holds no password, since whoever may look at Serve sees the configuration.
"""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from serve_app.settings.model import MAX_COUNT, FrozenSettings

DEFAULT_MAX_FILE_BYTES = 200 * 2**20  # OpenAI's bound on the input file of a batch
DEFAULT_MAX_ROWS = 50_000  # OpenAI's bound on the requests of a batch
# Rows of a model that one worker has running or waiting: two engines of 256 sequences. Each holds its body in memory.
DEFAULT_MAX_IN_FLIGHT = 512
DEFAULT_FILES_EXPIRE_DAYS = 30  # as OpenAI keeps the output files of a batch
DEFAULT_RECORDS_EXPIRE_DAYS = 90  # of ended batches and deleted files: the last quarter can be looked up
MIN_RECORDS_EXPIRE_DAYS = 1  # a call repeated by then still finds what it made
MAX_DAYS = 36_525.0  # a century
DEFAULT_MAX_DELIVERIES = 5  # of one entry, each after the death of its consumer; then the entry itself is suspected
# Of a consumer that is not heard of, after which others take its entries: below the 30 s for which the run of a request
# goes on without a reader, so that it is joined and not run again.
DEFAULT_CLAIM_IDLE_S = 20.0
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
REDIS_PARAMETERS = {"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}  # of the client's
VISIBLE = re.compile(r"[\x21-\x7e]{1,200}")  # a part of Idempotency-Keys, which are header values
SECRET_PARAMETERS = {"password", "secret", "key", "token"}  # names of query parameters that hold one


def _visible(name: str) -> str:
    if VISIBLE.fullmatch(name) is None:
        raise ValueError("must be 1 to 200 visible ASCII characters")
    return name


StreamName = Annotated[str, AfterValidator(_visible)]


def _without_password(url: str, instead: str) -> str:
    """Raises ValueError: it holds one, or it is no URL."""
    parsed = urlsplit(url)
    _ = parsed.port  # raises ValueError for what is none
    if parsed.password is not None or SECRET_PARAMETERS & parse_qs(parsed.query).keys():
        raise ValueError(
            f"must hold no password, since whoever may look at Serve sees the configuration: {instead} on every node"
        )
    return url


class RedisStreamSettings(FrozenSettings):
    """One stream whose entries are rows, and where their answers go."""

    stream: StreamName
    group: StreamName = "serve-app"  # the consumer group that all workers are in
    reply_stream: StreamName
    reply_prefix: StreamName | None = None  # an entry's `reply_to` has to begin with it; None: all replies go to one
    dead_stream: StreamName  # entries that cannot be answered, with the reason
    key_id: str = Field(min_length=1)  # the id of the API key that its rows run as; of the configuration: its name
    max_deliveries: int = Field(DEFAULT_MAX_DELIVERIES, ge=1, le=1000)
    claim_idle_s: float = Field(DEFAULT_CLAIM_IDLE_S, ge=1, le=86_400)
    # MAXLEN ~ of the reply streams and of the dead-letter stream; None: entries stay until their reader deletes them.
    reply_maxlen: int | None = Field(None, ge=1, le=MAX_COUNT)
    dead_maxlen: int | None = Field(None, ge=1, le=MAX_COUNT)
    delete_answered: bool = False  # XDEL with the reply; not where other groups read the stream, too


class RedisSettings(FrozenSettings):
    """Where the streams are."""

    url: str
    streams: tuple[RedisStreamSettings, ...] = Field(min_length=1)

    @field_validator("url")
    @classmethod
    def _reachable(cls, url: str) -> str:
        if not url.startswith(REDIS_SCHEMES):
            raise ValueError(f"must begin with {', '.join(REDIS_SCHEMES[:-1])} or {REDIS_SCHEMES[-1]}")
        _without_password(url, "put it into the variable REDIS_PASSWORD")
        parsed = urlsplit(url)
        if parsed.scheme == "unix" and not parsed.path.strip("/"):
            raise ValueError("must name the socket by its full path: unix:///its/path")
        if parsed.scheme != "unix" and not (parsed.hostname and re.fullmatch(r"/?\d*", parsed.path)):
            raise ValueError(f"must be {parsed.scheme}://host:port/number of the database")
        unknown = sorted(parse_qs(parsed.query, keep_blank_values=True).keys() - REDIS_PARAMETERS)
        if unknown:
            raise ValueError(
                f"has the unknown parameter {unknown[0]!r}: {', '.join(sorted(REDIS_PARAMETERS))} are known"
            )
        return url

    @model_validator(mode="after")
    def _distinct_streams(self) -> RedisSettings:
        """A reply or a dead letter is never read as an entry: it would be answered again, for ever."""
        names = [one.stream for one in self.streams]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"streams: {name!r} is given twice")
        for index, stream in enumerate(self.streams):
            for field, name in (("reply_stream", stream.reply_stream), ("dead_stream", stream.dead_stream)):
                if name in names:
                    raise ValueError(f"streams.{index}.{field}: {name!r} is a stream of entries, too")
            if stream.reply_stream == stream.dead_stream:
                raise ValueError(f"streams.{index}: reply_stream and dead_stream are both {stream.dead_stream!r}")
        return self


class BatchSettings(FrozenSettings):
    """The batch lane: files, batches, and the workers that run their rows."""

    workers: int = Field(1, ge=0, le=64)  # replicas; 0: no worker, and no batch is accepted
    # A URL of fsspec; None: a folder beside the store's file on the head node.
    files_url: str | None = Field(None, min_length=1)
    max_file_bytes: int = Field(DEFAULT_MAX_FILE_BYTES, ge=1024, le=MAX_COUNT)
    # Of its files together, those of results too; None: any.
    max_bytes_per_tenant: int | None = Field(None, ge=1024, le=MAX_COUNT)
    max_rows: int = Field(DEFAULT_MAX_ROWS, ge=1, le=MAX_COUNT)  # of one batch
    max_in_flight: int = Field(DEFAULT_MAX_IN_FLIGHT, ge=1, le=MAX_COUNT)  # rows of a model in one worker
    files_expire_days: float = Field(DEFAULT_FILES_EXPIRE_DAYS, gt=0, le=MAX_DAYS)
    records_expire_days: float = Field(DEFAULT_RECORDS_EXPIRE_DAYS, ge=MIN_RECORDS_EXPIRE_DAYS, le=MAX_DAYS)
    redis: RedisSettings | None = None

    @field_validator("files_url")
    @classmethod
    def _full_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parsed = urlsplit(url)
        if not parsed.scheme:
            raise ValueError("must begin with a scheme: file:///its/path, s3://bucket/path, gs://bucket/path")
        if parsed.scheme == "file" and not (parsed.netloc == "" and parsed.path.startswith("/")):
            raise ValueError("must name the folder on the head node by its full path: file:///its/path")
        return _without_password(url, "set what the storage's own programs read")

    @model_validator(mode="after")
    def _worked(self) -> BatchSettings:
        if self.redis is not None and not self.workers:
            raise ValueError("workers is 0: nobody would read the streams of `redis`")
        return self
