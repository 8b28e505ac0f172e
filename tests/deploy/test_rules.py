"""The rules of deploy/prometheus: what fires at which fault, and that nothing fires without one. promtool judges."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.dashboards.files import ROOT, RULES, RUNBOOKS
from scripts.dashboards.rules import ALERTS, RECORDINGS, Severity
from serve_app.router.metrics.table import ClusterFigure, Figure, Metric
from tests.deploy.faults import (
    FAULT,
    MINUTES,
    MODEL,
    REPLICAS,
    ROUTERS,
    TARGET,
    Deployment,
    growing,
    only_after,
    rising,
    sample_name,
    steady,
    then,
)
from tests.requires import requires
from tests.test_docs import anchors

MOST_ALERTS = 3  # of a fault
LATER = FAULT + 20  # above the longest `for`, and some minutes after the fault
PROMTOOL_S = 60.0

Fired = dict[str, tuple[dict[str, str], str]]  # by name: labels and summary
Fault = Callable[[Deployment], Fired]
OF_MODEL = {"model": MODEL}


def ask_promtool(*arguments: str) -> tuple[int, str]:
    requires("promtool")
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=PROMTOOL_S)
    return done.returncode, done.stdout + done.stderr


def judged(folder: Path, deployment: Deployment, fired: Fired, *minutes: int) -> str:
    """What promtool complains of if, in each of these minutes, exactly these alerts have to fire."""
    expected = [
        {"eval_time": f"{minute}m", "alertname": alert.name, "exp_alerts": expected_alerts(alert.name, fired)}
        for minute in minutes
        for alert in ALERTS
    ]
    test = {"interval": "1m", "input_series": deployment.input_series(), "alert_rule_test": expected}
    file = folder / "test.yaml"
    content = {"rule_files": [str(ROOT / RULES)], "evaluation_interval": "1m", "tests": [test]}
    file.write_text(yaml.safe_dump(content, width=100_000))
    status, text = ask_promtool("test", "rules", str(file))
    return "" if status == 0 else text


def expected_alerts(name: str, fired: Fired) -> list[dict[str, Any]]:
    if name not in fired:
        return []
    labels, summary = fired[name]
    (alert,) = [alert for alert in ALERTS if alert.name == name]
    return [
        {
            "exp_labels": labels | {"severity": alert.severity.value},
            "exp_annotations": {"summary": summary, "runbook_url": f"{RUNBOOKS}{alert.runbook}"},
        }
    ]


def engine_killed(deployment: Deployment) -> Fired:
    deployment.change(Figure.REPLICA_EJECTIONS, then(steady(0), steady(1)), reason="lost")
    deployment.change(Figure.EJECTED, then(then(steady(0), steady(1)), steady(0), FAULT + 1))
    deployment.change(ClusterFigure.REPLICAS, then(then(steady(2), steady(1)), steady(2), FAULT + 2), state="running")
    return {"EngineLost": (OF_MODEL, "A replica of chat died, hung or failed in the last 10 minutes.")}


def engine_frozen(deployment: Deployment) -> Fired:
    deployment.change(Figure.REPLICA_EJECTIONS, rising(0.2, 0), reason="lost")
    deployment.change(Figure.EJECTED, then(steady(0), steady(1)))
    return {
        "EngineLost": (OF_MODEL, "A replica of chat died, hung or failed in the last 10 minutes."),
        "Ejected": (OF_MODEL, "1 replicas of chat get no requests since they failed."),
    }


def last_engine_gone(deployment: Deployment) -> Fired:
    for replica in REPLICAS:
        deployment.lose(replica=replica)
    deployment.change(Figure.WAITING, then(steady(0), steady(6)), priority="normal")
    deployment.change(Metric.REFUSALS, rising(20), reason="no_replica", tenant="acme", router="r1", **OF_MODEL)
    deployment.change(ClusterFigure.REPLICAS, then(steady(2), [None] * MINUTES), state="running")
    return {"NoReplica": (OF_MODEL, "Requests ask for chat, and none of its replicas runs.")}


def memory_refused(deployment: Deployment) -> Fired:
    deployment.change(Figure.BLOCKED, then(steady(0), steady(1)))
    deployment.change(ClusterFigure.REPLICAS, then([None] * MINUTES, steady(1)), state="blocked", **OF_MODEL)
    return {"Blocked": (OF_MODEL, "1 engines of chat wait for GPU memory.")}


def starts_fail(deployment: Deployment) -> Fired:
    deployment.change(ClusterFigure.REPLICAS, then(steady(2), steady(1), 40), state="running")
    deployment.change(ClusterFigure.REPLICAS, only_after(steady(1), 40), state="loading", **OF_MODEL)
    return {"ReplicasMissing": (OF_MODEL, "1 replicas of chat have been missing for 30 minutes.")}


def tenant_hogs(deployment: Deployment) -> Fired:
    """It fills the queue with its requests, and the other tenant's generations wait 9 s."""
    deployment.change(Metric.PROMPT_TOKENS, then(growing(33_000), growing(180_000)), tenant="acme")
    deployment.change(Metric.TIME_TO_FIRST_TOKEN, then(growing(27), growing(54 * 9)), "_sum", tenant="beta")
    deployment.change(Figure.WAITING_RATIO, then(steady(0.02), steady(0.35)))
    deployment.change(Figure.WAITING, then(steady(2), steady(350)), priority="normal")
    deployment.change(Metric.QUEUE_WAIT, then(growing(240), growing(60 * 500)), "_sum", priority="normal")
    deployment.change(Metric.REFUSALS, rising(30), reason="queue_full")
    return {
        "Hog": (
            OF_MODEL | {"tenant": "acme"},
            "acme uses 82.91% of the tokens of chat, and the other tenants wait for their first tokens.",
        ),
        "Flood": (
            OF_MODEL | {"priority": "normal"},
            "normal is 94.59% of the requests that wait for chat, and the queue is filling.",
        ),
        "Refused": (OF_MODEL | {"reason": "queue_full"}, "chat refuses 1.0 requests a second: queue_full."),
    }


def class_floods(deployment: Deployment) -> Fired:
    deployment.change(Figure.WAITING, then(steady(20), steady(900)), priority="low")
    deployment.change(Figure.WAITING_RATIO, then(steady(0.02), steady(0.46)))
    deployment.change(Metric.REFUSALS, rising(30), reason="queue_full", priority="normal")
    deployment.change(Metric.SLO_MISSED, then(growing(1), growing(60)))
    return {
        "Flood": (
            OF_MODEL | {"priority": "low"},
            "low is 99.78% of the requests that wait for chat, and the queue is filling.",
        ),
        "Refused": (OF_MODEL | {"reason": "queue_full"}, "chat refuses 1.0 requests a second: queue_full."),
    }


def queue_fills(deployment: Deployment) -> Fired:
    """With all classes."""
    deployment.change(Figure.WAITING, then(steady(20), steady(400)), priority="low")
    deployment.change(Figure.WAITING, then(steady(2), steady(400)), priority="normal")
    deployment.change(Figure.WAITING_RATIO, then(steady(0.02), steady(0.45)))
    deployment.change(Metric.QUEUE_WAIT, then(growing(240), growing(60 * 500)), "_sum", priority="normal")
    return {"QueueFills": (OF_MODEL, "The queue of chat is 90% full.")}


def requests_wait(deployment: Deployment) -> Fired:
    """With a queue that is far from full."""
    deployment.change(Metric.QUEUE_WAIT, then(growing(240), growing(60 * 25)), "_sum", priority="normal")
    deployment.change(Metric.SLO_MISSED, then(growing(1), growing(12)))
    return {
        "Waits": (
            OF_MODEL | {"priority": "normal"},
            "25 requests of class normal wait for chat on average.",
        ),
        "SloMissed": (
            OF_MODEL | {"priority": "normal"},
            "chat misses the service level of class normal for 10% of its requests.",
        ),
    }


def kv_tokens_full(deployment: Deployment) -> Fired:
    deployment.change(ClusterFigure.KV_USED_RATIO, then(steady(0.8), steady(0.98)), replica="e1")
    labels = {"priority": "normal", "reason": "kv_tokens", "router": "r1"} | OF_MODEL
    deployment.change(Metric.QUEUE_WAIT, rising(60 * 3), "_sum", **labels)
    return {
        "KvFull": (
            OF_MODEL | {"replica": "e1"},
            "The KV tokens of e1 of chat are used up, and requests wait for them.",
        )
    }


def store_dead(deployment: Deployment) -> Fired:
    deployment.change(ClusterFigure.UP, then(steady(1), steady(0)), part="store")
    deployment.change(Metric.REFUSALS, rising(30), reason="no_store", router="r1", tenant="acme", **OF_MODEL)
    return {
        "StoreAway": ({"part": "store"}, "The store does not answer: keys, use and batches get 503."),
        "Refused": (OF_MODEL | {"reason": "no_store"}, "chat refuses 0.5 requests a second: no_store."),
    }


def quota_actor_frozen(deployment: Deployment) -> Fired:
    deployment.change(ClusterFigure.UP, then(steady(1), steady(0)), part="quota_actor")
    deployment.lose(replica="e1", kind="total")
    return {"Silent": ({"part": "quota_actor"}, "The quota_actor does not answer.")}


def router_lost(deployment: Deployment) -> Fired:
    deployment.lose(router="r2")
    here = {"instance": TARGET["instance"]}
    return {"RouterLost": (here, "1 routers of 127.0.0.1:8000 answer, and its configuration wants more.")}


def router_lost_beside_another_deployment(deployment: Deployment) -> Fired:
    """One Prometheus watches both, and the other one has all of its routers."""
    other = {"instance": "127.0.0.1:8001"}
    deployment.put(sample_name(ClusterFigure.ROUTERS_WANTED), other, steady(3))
    for router in ("o1", "o2", "o3"):
        labels = other | {"router": router, "version": "0.6.0", "vllm": "0.32.0"}
        deployment.put(sample_name(Figure.BUILD_INFO), labels, steady(1))
    return router_lost(deployment)


def endpoint_dead(deployment: Deployment) -> Fired:
    for labels in (
        {"model": MODEL},
        {"part": "store"},
        {"part": "quota_actor"},
        *({"router": name} for name in ROUTERS),
    ):
        deployment.lose(**labels)
    deployment.put("up", {}, then(steady(1), steady(0)))
    return {"NoAnswer": (TARGET, "Prometheus gets no answer of 127.0.0.1:8000.")}


def requests_fail(deployment: Deployment) -> Fired:
    deployment.change(Metric.REQUESTS, then(growing(0), growing(6)), outcome="engine_failed")
    return {"Fails": (OF_MODEL, "9.091% of the requests to chat fail.")}


def a_stream_breaks(deployment: Deployment) -> Fired:
    """Once, and its counter is born with it."""
    labels = {"reason": "losses", "router": "r1"} | OF_MODEL
    deployment.put(sample_name(Metric.NOT_CONTINUABLE), labels, only_after(steady(1), LATER - 3))
    return {"StreamsBreak": (OF_MODEL | {"reason": "losses"}, "Streams of chat lost their replica and ended: losses.")}


def disk_full(deployment: Deployment) -> Fired:
    """Of the node of one router."""
    deployment.put(sample_name(Metric.RECORDS_LOST), {"router": "r1"}, rising(60, 0))
    summary = "Router r1 cannot write its request log: the disk of its node is full."
    return {"RecordsLost": ({"router": "r1"}, summary)}


FAULTS: tuple[Fault, ...] = (
    engine_killed,
    engine_frozen,
    last_engine_gone,
    memory_refused,
    starts_fail,
    tenant_hogs,
    class_floods,
    queue_fills,
    requests_wait,
    kv_tokens_full,
    store_dead,
    quota_actor_frozen,
    router_lost,
    router_lost_beside_another_deployment,
    endpoint_dead,
    requests_fail,
    a_stream_breaks,
    disk_full,
)
SOON = {engine_killed: FAULT + 5}  # what is over after ten minutes


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_fires_its_alerts_and_no_other(tmp_path: Path, fault: Fault) -> None:
    deployment = Deployment()
    fired = fault(deployment)
    assert 1 <= len(fired) <= MOST_ALERTS
    assert judged(tmp_path, deployment, fired, SOON.get(fault, LATER)) == ""


def test_an_alert_that_nobody_expects_is_seen(tmp_path: Path) -> None:
    deployment = Deployment()
    memory_refused(deployment)
    assert "Blocked" in judged(tmp_path, deployment, {}, LATER)


def test_every_alert_has_a_fault_that_fires_it() -> None:
    fired = {name for fault in FAULTS for name in fault(Deployment())}
    assert fired == {alert.name for alert in ALERTS}


def idle() -> Deployment:
    return Deployment(is_idle=True)


def upgraded() -> Deployment:
    """Both routers and replicas are replaced, one after the other, with a surge."""
    deployment = Deployment()
    for number, router in enumerate(ROUTERS):
        deployment.add_router(f"new-{router}", only_after(steady(1), FAULT + number))
        deployment.lose(minute=FAULT + number + 2, router=router)
    deployment.change(ClusterFigure.REPLICAS, only_after(steady(1)), state="loading", **OF_MODEL)
    deployment.lose(minute=FAULT + 12, state="loading")
    return deployment


def watched_anew() -> Deployment:
    """Prometheus starts beside a deployment that has seen failures long ago."""
    deployment = Deployment()
    deployment.change(Figure.REPLICA_EJECTIONS, steady(7), reason="lost")
    deployment.change(Metric.NOT_CONTINUABLE, steady(4), reason="losses", router="r1", **OF_MODEL)
    for minute in range(LATER - 6):
        deployment.hide(minute, **TARGET)
    return deployment


def one_scrape_missed() -> Deployment:
    """By a router with old failures, ten minutes ago."""
    deployment = Deployment()
    deployment.change(Figure.REPLICA_EJECTIONS, steady(7), reason="lost")
    deployment.change(Metric.NOT_CONTINUABLE, steady(4), reason="losses", router="r1", **OF_MODEL)
    deployment.hide(LATER - 10, router="r1")
    return deployment


def woken_model() -> Deployment:
    """One with `min_replicas: 0` that starts with its first request."""
    deployment = Deployment()
    for router in ROUTERS:
        labels = {"model": "asleep", "priority": "normal", "router": router}
        deployment.put(sample_name(Figure.WAITING), labels, then(steady(0), steady(3), LATER - 3))
    return deployment


def scaled_down() -> Deployment:
    deployment = Deployment()
    deployment.lose(replica="e2")
    deployment.change(ClusterFigure.REPLICAS_TARGET, then(steady(2), steady(1)))
    deployment.change(ClusterFigure.REPLICAS, then(steady(2), steady(1)), state="running")
    return deployment


def fewer_routers() -> Deployment:
    """One is enough, by a changed configuration."""
    deployment = Deployment()
    deployment.change(ClusterFigure.ROUTERS_WANTED, then(steady(2), steady(1)))
    deployment.lose(router="r2")
    return deployment


def full_of_batches() -> Deployment:
    """Nobody but class low waits, for KV tokens, too."""
    deployment = Deployment()
    deployment.change(ClusterFigure.KV_USED_RATIO, steady(0.99))
    labels = {"priority": "low", "reason": "kv_tokens", "router": "r1"} | OF_MODEL
    deployment.change(Metric.QUEUE_WAIT, growing(60 * 200), "_sum", **labels)
    return deployment


QUIET: tuple[Callable[[], Deployment], ...] = (
    Deployment,
    idle,
    upgraded,
    watched_anew,
    one_scrape_missed,
    woken_model,
    scaled_down,
    fewer_routers,
    full_of_batches,
)


@pytest.mark.parametrize("deployment", QUIET, ids=lambda made: made.__name__)
def test_nothing_fires_without_a_fault(tmp_path: Path, deployment: Callable[[], Deployment]) -> None:
    assert judged(tmp_path, deployment(), {}, 5, FAULT + 1, LATER) == ""


def test_the_first_event_of_a_series_counts(tmp_path: Path) -> None:
    """`increase` alone gives nothing: there was no zero before it."""
    deployment = Deployment()
    a_stream_breaks(deployment)
    (alert,) = [alert for alert in ALERTS if alert.name == "StreamsBreak"]
    plain = "sum by (model, reason) (increase(serve_app_not_continuable_total[10m])) > 0"
    samples = {alert.expression.text: [{"labels": '{model="chat", reason="losses"}', "value": 1}], plain: []}
    test = {
        "interval": "1m",
        "input_series": deployment.input_series(),
        "promql_expr_test": [
            {"expr": text, "eval_time": f"{LATER}m", "exp_samples": found} for text, found in samples.items()
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": [test]}, width=100_000))
    assert ask_promtool("test", "rules", str(file)) == (0, "Unit Testing:  " + str(file) + "\n  SUCCESS\n\n")


def test_promtool_takes_the_rules() -> None:
    status, text = ask_promtool("check", "rules", str(ROOT / RULES))
    assert status == 0, text
    assert f"SUCCESS: {len(ALERTS) + len(RECORDINGS)} rules found" in text


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_leads_to_a_heading_that_exists(alert: Any) -> None:
    page, _, anchor = alert.runbook.partition("#")
    file = ROOT / RUNBOOKS / page
    assert file.is_file(), page
    assert not anchor or anchor in anchors(file)
    assert alert.severity in Severity


def test_alerts_and_recordings_have_names_of_their_own() -> None:
    names = [rule.name for rule in (*ALERTS, *RECORDINGS)]
    assert len(names) == len(set(names))
