"""Where spans go, as the configuration says it."""

from __future__ import annotations

import pytest

from serve_app.errors import ConfigError
from serve_app.settings import parse


@pytest.mark.parametrize(
    "endpoint", [None, "http://collector:4318", "https://otlp.example/tenant/", "http://[::1]:4318"]
)
def test_a_collector_has_an_http_address(endpoint: str | None) -> None:
    assert parse({"traces": {"endpoint": endpoint}}).traces.endpoint == endpoint


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("", "must not be empty"),
        ("collector:4318", "http://collector:4318"),
        ("grpc://collector:4317", "http://collector:4318"),
        ("http://", "http://collector:4318"),
        ("http://collector:4318?key=secret", "http://collector:4318"),
        ("http://collector:five", "[Pp]ort"),
        ("http://user:secret@collector:4318", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_what_is_no_address_or_holds_a_password_is_refused(endpoint: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        parse({"traces": {"endpoint": endpoint}})
    assert refused.value.param == "traces.endpoint"
    assert "secret" not in refused.value.message


def test_traces_are_off_unless_they_are_asked_for() -> None:
    assert parse({}).traces.endpoint is None
