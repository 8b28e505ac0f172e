"""What a deploy by HTTP may change: every setting is open or closed, and no closed one gets through by any way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from serve_app.errors import BadRequest, ConfigError, Forbidden
from serve_app.settings import ModelSettings, Settings, parse, remote_settings
from serve_app.settings.remote_changes import OPEN, OPEN_OF_MODEL

DIGEST = "ab" * 32
OTHER = "cd" * 32
TENANT = "ci"
RUNNING = parse(
    {
        "models": [
            {"name": "a", "path": "/models/a", "extra_engine_args": {"seed": 1}, "prices": {"output_per_million": 2}},
            {"name": "b"},
        ],
        "auth": {"keys": [{"key_sha256": DIGEST, "name": "ci", "tenant": TENANT, "deploy": True}]},
        "admission": {"tenants": {TENANT: {"limits": {"max_concurrent": 2}}, "acme": {}}},
        "store": {"url": "postgresql://db/serve", "audit_days": 30},
        "traces": {"endpoint": "http://collector:4318"},
    }
)
# A value of each closed setting that differs from what runs.
CLOSED: dict[str, Any] = {
    "auth.keys": [{"key_sha256": DIGEST, "name": "ci", "tenant": TENANT, "deploy": True, "admin": True}],
    "auth.key_file": "/root/key",
    "auth.key_limits": {"max_concurrent": 99},
    "auth.jwt": {"issuer": "https://evil", "audience": "a", "jwks_url": "https://evil/keys", "tenant": "acme"},
    "http.cors_origins": ["https://evil.example"],
    "http.console": False,
    "http.tls": {"certificate": "/etc/shadow", "key": "/etc/shadow"},
    "scaling.max_gpus": 1e6,
    "scaling.record_decisions": True,
    "store.url": "sqlite:////etc/passwd",
    "store.audit_days": 1,
    "responses.store_by_default": True,
    "responses.keep_s": 1,
    "responses.max_bytes_per_tenant": 2**20,
    "batch.files_url": "file:///root",
    "batch.files_expire_days": 0.001,
    "batch.records_expire_days": 1,
    "batch.redis": {
        "url": "redis://evil:6379",
        "streams": [{"stream": "s", "reply_stream": "r", "dead_stream": "d", "key_id": "ops"}],
    },
    "traces.endpoint": "http://evil:4318",
    "logs.format": "json",
    "logs.prompts": True,
    "records.keep_days": 0.001,
    "records.max_bytes": 2**40,
}
CLOSED_OF_MODEL: dict[str, Any] = {
    "path": "/root/secrets",
    "extra_engine_args": {"trust_remote_code": True},
    "chat_template": "/etc/shadow",
    "media_domains": ["169.254.169.254"],
    "prices": {"output_per_million": 0},
}


def nested(path: str, value: Any) -> dict[str, Any]:
    section, _, name = path.partition(".")
    return {section: {name: value}}


def sent(**more: Any) -> dict[str, Any]:
    return {"models": [{"name": "a"}, {"name": "b"}], "admission": {"tenants": {TENANT: own(), "acme": {}}}} | more


def own() -> dict[str, Any]:
    return {"limits": {"max_concurrent": 2}}


def refused(given: Mapping[str, Any], tenant: str = TENANT) -> str | None:
    with pytest.raises(Forbidden) as error:
        remote_settings(RUNNING, given, tenant)
    assert error.value.code == "only_from_machine"
    assert str(error.value.param) in error.value.message
    return error.value.param


def test_what_is_not_sent_of_the_closed_settings_stays_and_the_rest_is_as_it_was_sent() -> None:
    found = remote_settings(RUNNING, sent(http={"max_sequences": 7}, traces={"sample_ratio": 0.5}), TENANT)
    assert found.models[0].path == "/models/a"
    assert found.models[0].extra_engine_args == {"seed": 1}
    assert found.models[0].prices == RUNNING.models[0].prices
    assert (found.auth, found.store) == (RUNNING.auth, RUNNING.store)
    assert (found.traces.endpoint, found.traces.sample_ratio) == ("http://collector:4318", 0.5)
    assert found.http.max_sequences == 7


def test_open_settings_of_a_model_change() -> None:
    models = [{"name": "a", "max_num_seqs": 3, "replicas": {"max_replicas": 4}}, {"name": "b"}]
    found = remote_settings(RUNNING, sent(models=models), TENANT)
    assert (found.models[0].max_num_seqs, found.models[0].replicas.max_replicas) == (3, 4)
    assert [one.name for one in remote_settings(RUNNING, sent(models=[{"name": "a"}]), TENANT).models] == ["a"]


@pytest.mark.parametrize("path", CLOSED)
def test_a_closed_setting_that_differs_is_refused_with_its_name(path: str) -> None:
    assert refused(sent(**nested(path, CLOSED[path]))) == path


@pytest.mark.parametrize("name", CLOSED_OF_MODEL)
def test_a_closed_setting_of_a_model_is_refused_of_one_that_runs_and_of_a_new_one(name: str) -> None:
    value = CLOSED_OF_MODEL[name]
    assert refused(sent(models=[{"name": "b"}, {"name": "a", name: value}])) == f"models.1.{name}"
    assert refused(sent(models=[{"name": "a"}, {"name": "b"}, {"name": "c", name: value}])) == f"models.2.{name}"


def test_a_running_model_s_folder_cannot_be_served_under_another_name() -> None:
    """A key that may use `b` alone would read `a` by that name."""
    assert refused(sent(models=[{"name": "a"}, {"name": "c", "path": "/models/a"}])) == "models.1.path"
    assert refused(sent(models=[{"name": "b", "path": "/models/a"}])) == "models.0.path"


def test_the_same_closed_value_may_be_sent() -> None:
    keys = [{"key_sha256": DIGEST, "name": "ci", "tenant": TENANT, "deploy": True}]
    models = [{"name": "a", "path": "/models/a", "extra_engine_args": {"seed": 1}}, {"name": "b", "path": "tiny"}]
    given = sent(models=models, auth={"keys": keys}, store={"url": "postgresql://db/serve"})
    assert remote_settings(RUNNING, given, TENANT).auth == RUNNING.auth


def test_null_is_another_value_than_none_sent() -> None:
    assert refused(sent(store={"url": None})) == "store.url"
    assert refused(sent(traces={"endpoint": None})) == "traces.endpoint"
    with pytest.raises(ConfigError, match="store"):
        remote_settings(RUNNING, sent(store=None), TENANT)


@pytest.mark.parametrize(
    "tenants",
    [
        {TENANT: {"limits": {"max_concurrent": 99}}, "acme": {}},
        {TENANT: own() | {"share": 0.5}, "acme": {}},
        {"acme": {}},
    ],
)
def test_a_key_gives_its_own_tenant_no_more(tenants: dict[str, Any]) -> None:
    given = sent(admission={"tenants": tenants})
    assert refused(given) == f"admission.tenants.{TENANT}"
    assert remote_settings(RUNNING, given, "another").admission.tenants == parse(given).admission.tenants


def test_a_variable_is_not_resolved_by_the_cluster() -> None:
    for given in (
        sent(http={"max_sequences": "${AWS_SECRET_ACCESS_KEY}"}),
        sent(models=[{"name": "a", "quantization": "${HOME}"}]),
        sent(admission={"tenants": {"${HOME}": {}}}),
    ):
        with pytest.raises(BadRequest, match="a variable"):
            remote_settings(RUNNING, given, TENANT)


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigError) as error:
        remote_settings(RUNNING, sent(models=[{"name": "a", "max_num_seqs": 0}]), TENANT)
    assert error.value.param == "models.0.max_num_seqs"
    with pytest.raises(ConfigError):
        remote_settings(RUNNING, {"models": "a"}, TENANT)


def test_texts_of_variables_stay_with_the_values_that_stay() -> None:
    names = {
        "store": {"url": "${DB}"},
        "http": {"max_sequences": "${SEQUENCES}"},
        "models": {"0": {"path": "${FOLDER}", "max_num_seqs": "${SEQS}"}},
    }
    running = RUNNING.with_names(names)
    models = [{"name": "b"}, {"name": "a", "max_num_seqs": 3}]
    found = remote_settings(running, sent(models=models, http={"max_sequences": 7}), TENANT)
    assert found.names == {"store": {"url": "${DB}"}, "models": {"1": {"path": "${FOLDER}"}}}


def test_every_name_of_an_open_setting_exists() -> None:
    for section, names in OPEN.items():
        assert names <= getattr(RUNNING, section).__class__.model_fields.keys(), section
    assert ModelSettings.model_fields.keys() >= OPEN_OF_MODEL


def test_every_closed_setting_has_an_attack_here() -> None:
    """A new setting is closed until somebody opens it; then it is attacked here, or opened with a reason."""
    closed = set()
    for section, field in Settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            closed |= {f"{section}.{name}" for name in kind.model_fields.keys() - OPEN.get(section, frozenset())}
    assert closed == CLOSED.keys()
    assert ModelSettings.model_fields.keys() - OPEN_OF_MODEL == CLOSED_OF_MODEL.keys()
