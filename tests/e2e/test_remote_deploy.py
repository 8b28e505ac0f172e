"""Deployments by HTTP on a real cluster: what is declared, recorded, undone, and refused while another one runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from serve_app.settings import application, configuration_digest, parse
from tests.e2e.changing import CHANGED_S, KEY, OTHER, Place, configured, model
from tests.e2e.test_model_changes import command
from tests.waiting import patient, wait_until

pytestmark = pytest.mark.long  # five changes of a cluster; tests/http has the routes, test_model_changes the changes

CI = "sk-deploys-0123456789"
AUTH = {"keys": [{"key": KEY, "name": "ops", "admin": True}, {"key": CI, "name": "ci", "tenant": "ci", "deploy": True}]}
BASE = configured(model(OTHER), auth=AUTH)
SLOW_START_S = 6.0  # of an engine: in which another deployment is refused
ANSWER_S = 120.0
UNDER_WAY = ("checking", "declaring", "waiting")


@pytest.fixture(scope="module")
def place(changing: Place) -> Place:
    changing.begin(BASE)
    return changing


def call(place: Place, method: str, path: str, key: str = CI, **options: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return requests.request(method, f"{place.cluster.url}{path}", headers=headers, timeout=patient(ANSWER_S), **options)


def sent(**changes: Any) -> dict[str, Any]:
    """The configuration without its keys, and with these changes of `OTHER`."""
    config = configured(model(OTHER, **changes))
    return {name: value for name, value in config.items() if name != "auth"}


def post(place: Place, given: dict[str, Any], **more: Any) -> requests.Response:
    return call(place, "POST", "/admin/deploys", json={"configuration": given, **more})


def ended(place: Place, begun: dict[str, Any]) -> dict[str, Any]:
    """How a deployment ended; routers may be on their way."""

    def look() -> dict[str, Any] | None:
        answer = call(place, "GET", f"/admin/deploys/{begun['id']}")
        found: dict[str, Any] = answer.json()
        return None if answer.status_code == 503 or found["state"] in UNDER_WAY else found

    return wait_until(look, CHANGED_S, "the deployment ends").found or {}


def audited(place: Place) -> list[dict[str, Any]]:
    return list(call(place, "GET", "/admin/audit?limit=1000", KEY).json()["data"])


def digest(**changes: Any) -> str:
    settings = parse(configured(model(OTHER, **changes), auth=AUTH)).without_secrets()
    return configuration_digest(application(settings)["args"])


def test_a_key_that_may_deploy_changes_a_model_and_the_record_has_it(place: Place) -> None:
    before = place.replicas("Router")
    plan = post(place, sent(max_num_seqs=5), plan_only=True).json()
    assert [(one["deployment"], one["effect"]) for one in plan["changes"] if one["effect"] == "restarted"] == [
        (f"engine-{OTHER}", "restarted")
    ]
    begun = post(place, sent(max_num_seqs=5))
    assert begun.status_code == 202, begun.text
    found = ended(place, begun.json())
    assert found["state"] == "done", found
    assert place.endpoint.ask(OTHER).status == 200
    assert place.replicas("Router") == before, "routers take the change over"
    entry = wait_until(lambda: audited(place)[-1], CHANGED_S, "an entry").found
    assert (entry["author"], entry["tenant"], entry["action"]) == ("ci", "ci", "deploy")
    assert (entry["digest_before"], entry["digest_after"]) == (digest(), digest(max_num_seqs=5))
    assert (found["digest_before"], found["digest_after"]) == (entry["digest_before"], entry["digest_after"])


def test_what_is_closed_is_refused_and_nothing_changes(place: Place) -> None:
    count = len(audited(place))
    for given, param in (
        ({**sent(), "auth": {"keys": [{"key": CI, "admin": True, "deploy": True}]}}, "auth.keys"),
        ({**sent(), "models": [{**sent()["models"][0], "path": "/etc"}]}, "models.0.path"),
        ({**sent(), "traces": {"endpoint": "http://127.0.0.1:9"}}, "traces.endpoint"),
    ):
        refused = post(place, given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, param), refused.text
    assert call(place, "POST", "/admin/deploys", KEY, json={"configuration": sent()}).status_code == 403
    assert len(audited(place)) == count
    assert post(place, sent(), plan_only=True).status_code == 200, "a refused one leaves the way free"


def test_a_deployment_that_fails_is_rolled_back_and_the_record_has_both(place: Place) -> None:
    """What no engine starts with: its KV cache holds no sequence of the longest length."""
    place.become(BASE)
    broken = {"max_model_len": 8192, "simulated": {"kv_cache_tokens": 4096}}
    begun = post(place, sent(**broken)).json()
    found = ended(place, begun)
    assert found["state"] == "rolled_back", found
    last = wait_until(
        lambda: [one for one in audited(place) if one["action"] == "deploy.roll_back"][-1:], CHANGED_S, "its entry"
    ).found
    (back,) = last
    made = audited(place)[-2]
    assert [one["author"] for one in (made, back)] == ["ci", "ci"]
    assert (made["action"], made["digest_before"], made["digest_after"]) == ("deploy", digest(), digest(**broken))
    assert (back["digest_before"], back["digest_after"]) == (digest(**broken), digest())
    place.wait_running(BASE)
    assert place.endpoint.ask(OTHER).status == 200


def test_two_deployments_never_overlap_whoever_asks_for_them(place: Place, tmp_path: Path) -> None:
    place.become(BASE)
    slow = {"simulated": {"start_s": patient(SLOW_START_S)}}
    begun = post(place, sent(**slow)).json()
    second = post(place, sent(max_num_seqs=6))
    assert (second.status_code, second.json()["error"]["code"]) == (409, "deploy_conflict"), second.text
    assert begun["id"] in second.json()["error"]["message"]
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump(BASE))
    machine = command(place, "deploy", "--no-check", "--config", str(file))
    assert (machine.returncode, "another deployment" in machine.stderr) == (1, True), machine.stderr
    assert ended(place, begun)["state"] == "done"
    machine = command(place, "deploy", "--no-check", "--config", str(file))
    assert machine.returncode == 0, machine.stderr
    assert audited(place)[-1]["author"] == "machine"


def test_the_command_deploys_from_a_laptop(place: Place, tmp_path: Path) -> None:
    place.become(BASE)
    file = tmp_path / "laptop.yaml"
    file.write_text(yaml.safe_dump(sent(max_num_seqs=7)))
    where = ("--url", place.cluster.url, "--key", CI)
    plan = command(place, "deploy", "--config", str(file), "--plan", "--json", *where)
    assert plan.returncode == 0, plan.stderr
    assert f"engine-{OTHER}" in [one["deployment"] for one in json.loads(plan.stdout)["plan"]], plan.stderr
    done = command(place, "deploy", "--config", str(file), *where)
    assert (done.returncode, "done" in done.stdout) == (0, True), done.stderr + done.stdout
    file.write_text(yaml.safe_dump({**sent(), "auth": {"key_file": "/etc/shadow"}}))
    refused = command(place, "deploy", "--config", str(file), *where)
    assert (refused.returncode, "auth.key_file" in refused.stderr) == (2, True), refused.stderr
