"""The batch lane, as the configuration says it."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.errors import ConfigError
from serve_app.settings import parse

STREAM = {"stream": "rows", "reply_stream": "answers", "dead_stream": "dead", "key_id": "ops"}


@pytest.mark.parametrize("url", [None, "file:///var/lib/files", "s3://bucket/path", "gs://bucket", "memory://files"])
def test_files_are_in_a_folder_or_at_a_url(url: str | None) -> None:
    assert parse({"batch": {"files_url": url}}).batch.files_url == url


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("/var/lib/files", "scheme"),
        ("file://var/lib/files", "full path"),
        ("s3://id:secret@bucket/path", "no password"),
        ("s3://bucket/path?secret=secret", "no password"),
    ],
)
def test_files_elsewhere_are_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        parse({"batch": {"files_url": url}})
    assert refused.value.param == "batch.files_url"


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:6379/0",
        "redis://localhost",
        "redis://rows@host:7000",
        "rediss://host/3?ssl_ca_certs=/etc/ssl/redis.pem",
        "unix:///run/redis.sock?db=2",
    ],
)
def test_streams_are_read_from_a_redis_without_its_password(url: str) -> None:
    redis = {"url": url, "streams": [STREAM]}
    found = parse({"batch": {"redis": redis}}).batch.redis
    assert found is not None
    assert found.streams[0].group == "serve-app"


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"redis": {"url": "redis://:secret@host", "streams": [STREAM]}}, "REDIS_PASSWORD"),
        ({"redis": {"url": "http://host", "streams": [STREAM]}}, "must begin with"),
        ({"redis": {"url": "redis:host", "streams": [STREAM]}}, "must begin with"),
        ({"redis": {"url": "redis://host:port", "streams": [STREAM]}}, "Port"),
        ({"redis": {"url": "redis://host/rows", "streams": [STREAM]}}, "number of the database"),
        ({"redis": {"url": "redis:///0", "streams": [STREAM]}}, "number of the database"),
        ({"redis": {"url": "unix://", "streams": [STREAM]}}, "full path"),
        ({"redis": {"url": "redis://host?timeout=3", "streams": [STREAM]}}, "unknown parameter 'timeout'"),
        ({"redis": {"url": "rediss://host?password=secret", "streams": [STREAM]}}, "REDIS_PASSWORD"),
        ({"redis": {"url": "redis://host", "streams": [{**STREAM, "stream": "two words"}]}}, "visible ASCII"),
        ({"redis": {"url": "redis://host", "streams": [{**STREAM, "reply_stream": "rows"}]}}, "stream of entries, too"),
        ({"redis": {"url": "redis://host", "streams": [{**STREAM, "dead_stream": "rows"}]}}, "stream of entries, too"),
        ({"redis": {"url": "redis://host", "streams": [{**STREAM, "dead_stream": "answers"}]}}, "are both 'answers'"),
        (
            {"redis": {"url": "redis://host", "streams": [{**STREAM, "claim_idle_s": 0.1}]}},
            "must be 1 or more",
        ),
        ({"redis": {"url": "redis://host", "streams": [{**STREAM, "tenant": "x"}]}}, "unknown key"),
        ({"redis": {"url": "redis://host", "streams": []}}, "must not be empty"),
        ({"redis": {"url": "redis://host", "streams": [STREAM, STREAM]}}, "given twice"),
        ({"redis": {"url": "redis://host", "streams": [STREAM]}, "workers": 0}, "workers is 0"),
        ({"workers": -1}, "must be 0 or more"),
    ],
)
def test_streams_that_nobody_could_read_are_refused(batch: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        parse({"batch": batch})
    assert refused.value.param is not None
    assert refused.value.param.startswith("batch")


def test_a_tenant_has_limits_for_its_batches() -> None:
    tenants = {"research": {"batch_limits": {"tokens_per_day": 1000}}}
    found = parse({"admission": {"tenants": tenants}}).admission.tenants["research"]
    assert found.batch_limits.tokens_per_day == 1000
    assert found.limits.tokens_per_day is None
