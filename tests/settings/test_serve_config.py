"""Our configuration as Serve's: what is in it, what is never in it, and what is made out of Serve's answers."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from autoscaling.operations.status import declared, declared_models, describe, is_built
from serve_app.app import build
from serve_app.cli.deploy import ON_A_CLUSTER, export
from serve_app.errors import ConfigError
from serve_app.names import APPLICATION, RELEASE
from serve_app.settings.serve_config import (
    POLICY,
    application,
    as_change,
    configuration_digest,
    with_other_applications,
)
from serve_app.settings.settings import QuotaSettings, Settings, parse

KEY = "sk-0123456789abcdef"


def settings(**changes: Any) -> Settings:
    return parse({"auth": {"keys": [{"key": KEY}]}, **changes})


def test_a_key_in_clear_never_gets_into_it() -> None:
    with pytest.raises(ValueError, match="in clear"):
        application(settings())
    entry = application(settings().without_secrets())
    assert KEY not in json.dumps(entry)
    assert entry["args"]["auth"]["keys"][0]["key_sha256"]
    assert entry["args"].pop("release") == RELEASE
    assert parse(entry["args"]) == settings().without_secrets()  # and nothing else is lost on the way


def test_the_scaling_policy_is_there_also_where_nothing_scales() -> None:
    assert application(settings().without_secrets())["autoscaling_policy"] == {"policy_function": POLICY}


def test_another_release_than_the_installed_one_is_refused_by_name() -> None:
    entry = application(settings().without_secrets())
    with pytest.raises(ConfigError, match=r"^release: serve-app 0\.1\.0 declares it, and .* is installed"):
        build({**entry["args"], "release": "0.1.0"})


def test_what_the_controller_has_to_know_of_models_that_the_ledger_places_goes_with_the_policy() -> None:
    models = [
        {"name": "org/part", "gpus_per_rank": 0.25},
        {"name": "stated", "memory_gb": 2, "tensor_parallel_size": 2},
        {"name": "whole", "gpus_per_rank": 1},
    ]
    policy = application(settings(models=models).without_secrets())["autoscaling_policy"]
    assert policy["policy_function"] == POLICY
    starts = policy["policy_kwargs"]["starts"]
    assert starts["application"] == APPLICATION
    assert starts["models"] == {"engine-org--part": ["org/part", None], "engine-stated": ["stated", 4 * 10**9]}
    assert QuotaSettings.model_validate(starts["quota"]) == settings().quota
    json.dumps(policy)


def test_what_is_not_given_is_left_to_the_running_serve() -> None:
    def exported(host: str | None, port: int | None) -> dict[str, Any]:
        found = yaml.safe_load(export(settings(), host=host, port=port, proxy_location="HeadOnly"))
        del found["applications"]
        return found  # type: ignore[no-any-return]

    assert exported(None, None) == {"proxy_location": "HeadOnly"}
    assert exported(None, 8001) == {"proxy_location": "HeadOnly", "http_options": {"port": 8001}}
    assert exported("::", 1) == {"proxy_location": "HeadOnly", "http_options": {"host": "::", "port": 1}}


def test_other_declared_applications_stay_and_those_run_by_hand_are_none_of_it() -> None:
    entry = application(settings().without_secrets())
    other = {"name": "other", "import_path": "a:b", "route_prefix": "/other"}
    details: dict[str, Any] = {
        "applications": {
            "other": {"deployed_app_config": other},
            "by-hand": {"deployed_app_config": None},
            APPLICATION: {"deployed_app_config": {"name": APPLICATION, "import_path": "old:one"}},
        }
    }
    before = copy.deepcopy(details)
    assert with_other_applications(entry, details) == [other, entry]
    assert details == before


def test_a_model_that_serve_has_keeps_its_number_of_replicas_and_a_new_one_starts_with_its_own() -> None:
    replicas = {"min_replicas": 2, "initial_replicas": 4, "max_replicas": 8}
    models = [{"name": "old", "replicas": replicas}, {"name": "new", "replicas": replicas}]
    arguments = application(settings(models=models).without_secrets())["args"]
    before = copy.deepcopy(arguments)
    assert as_change(arguments, ()) == arguments
    old, new = as_change(arguments, ["old", "gone"])["models"]
    assert (old["replicas"]["initial_replicas"], new["replicas"]["initial_replicas"]) == (None, 4)
    assert arguments == before


@pytest.mark.parametrize("wrong", [1, 9])
def test_the_number_to_start_with_is_within_the_bounds(wrong: int) -> None:
    with pytest.raises(ConfigError, match="initial_replicas"):
        settings(models=[{"name": "m", "replicas": {"min_replicas": 2, "initial_replicas": wrong, "max_replicas": 8}}])


def test_serve_s_own_schema_takes_what_is_exported() -> None:
    """And what it would fill in by itself does not change who may reach it."""
    where: Any = {"proxy_location": ON_A_CLUSTER["proxy_location"], "port": 8000} | ON_A_CLUSTER["http_options"]
    text = export(settings(models=[{"name": "a", "replicas": {"max_replicas": 2}}]), **where)
    assert KEY not in text
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (found,) = schema.applications
    assert (found.name, found.import_path, found.route_prefix) == (APPLICATION, "serve_app.app:build", "/")
    assert found.autoscaling_policy == {"policy_function": POLICY}
    assert (schema.http_options.host, schema.http_options.port) == ("0.0.0.0", 8000)


# What Serve tells.


def details(status: str = "RUNNING", deployments: tuple[str, ...] = ("engine-a",), **more: Any) -> dict[str, Any]:
    found = {name: {"name": name, "status": "HEALTHY", "message": "", "replicas": []} for name in deployments}
    for deployment in found.values():
        deployment |= {"target_num_replicas": 1, "deployment_config": {}}  # type: ignore[dict-item]
    reported = {"status": status, "message": "", "deployments": found, "deployed_app_config": None, **more}
    return {"applications": {APPLICATION: reported}, "proxies": {}}


@pytest.mark.parametrize(
    "arguments",
    [None, [], "text", {}, {"models": None}, {"models": "a"}, {"models": [1, None, {"name": 2}, {}]}, {"config": "f"}],
)
def test_arguments_of_others_making_are_no_reason_to_fail(arguments: Any) -> None:
    """`serve deploy` and Serve's REST interface accept anything as arguments."""
    reported = details(deployed_app_config={"name": APPLICATION, "args": arguments})
    assert declared_models(reported) == []
    assert describe(reported, declared_models(reported))["state"] == "starting"  # there is no proxy


def test_declared_models_are_those_of_the_arguments() -> None:
    entry = application(settings(models=[{"name": "org/a"}, {"name": "b"}]).without_secrets())
    reported = details(deployed_app_config=entry)
    assert declared(reported) == entry
    assert declared_models(reported) == ["org/a", "b"]
    assert declared(details()) is None
    assert declared({"applications": {}}) is None
    assert declared_models({"applications": {}}) == []


RAISED = """\
A replica failed to start with exception. Retrying 2 more time(s). Error:
Traceback (most recent call last):
  File "deployment.py", line 114, in __init__
serve_app.errors.EngineFailed: a did not start: ValueError: the weights are missing; log: /tmp/worker.err
"""


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (RAISED, "a did not start: ValueError: the weights are missing; log: /tmp/worker.err"),
        ("Deployment 'engine-a' has 1 replicas that have taken more than 30s to initialize.", ""),
    ],
)
def test_a_model_s_cause_is_why_its_replica_has_failed_and_no_wait(message: str, cause: str) -> None:
    reported = details("DEPLOYING")
    reported["applications"][APPLICATION]["deployments"]["engine-a"] |= {"status": "UPDATING", "message": message}
    found = describe(reported, ["a"])
    assert found["models"][0]["cause"] == cause
    assert found["message"] == f"engine-a: {cause or message}"


def test_it_is_known_when_serve_has_built_what_was_declared() -> None:
    assert is_built({"applications": {}}) is None
    assert is_built(details("DEPLOYING", ())) is None
    assert is_built(details("DEPLOY_FAILED", ())) is False
    assert is_built(details("DEPLOYING")) is True
    assert is_built(details("DEPLOY_FAILED")) is True  # it was built; one of its deployments has failed


def test_the_digest_is_of_the_configuration_alone() -> None:
    config = {"models": [{"name": "a", "replicas": {"initial_replicas": 2, "max_replicas": 3}}]}
    arguments = application(parse(config))["args"]
    digest = configuration_digest(arguments)
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert configuration_digest(arguments | {"release": "0.1.0"}) == digest
    assert configuration_digest(as_change(arguments, ["a"])) == digest, "declared again, it is the same"
    assert configuration_digest(json.loads(json.dumps(arguments))) == digest
    assert configuration_digest(application(parse(config | {"admission": {"max_queued": 1}}))["args"]) != digest
    assert re.fullmatch("[0-9a-f]{64}", configuration_digest({"models": "of another tool"}))
