"""What an operator sees: health, readiness, metrics, request ids, ports."""

from __future__ import annotations

import contextlib
import csv
import json
import socket
import time
from pathlib import Path

import grpc
import psutil
from prometheus_client.parser import text_string_to_metric_families

from serve_app.system import Listener
from serve_app.system.tls import ADMIN_SOCKETS
from tests.e2e.observe import HTTP_PROCESSES, PROBE_S, Observer, http_status, samples_of
from tests.e2e.stack import PEOPLE_KEY, TINY, Stack
from tests.requires import missing
from tests.waiting import patient

ENGINE_CORE = ("VLLM", "EngineCore", "spawn_main")  # its title, and what it is before it has one


def test_health_and_readiness_answer(stack: Stack) -> None:
    assert stack.get("/health").json() == {"status": "ok"}
    assert stack.get("/ready").json() == {"status": "ready", "without_replica": []}


def test_paths_may_end_in_a_slash(stack: Stack) -> None:
    assert stack.get("/v1/models/").status_code == 200
    assert stack.post("/v1/completions/", {"model": TINY, "prompt": "a", "max_tokens": 1}).status_code == 200


def test_the_answer_s_request_id_is_the_one_in_the_body(stack: Stack) -> None:
    body = {"model": TINY, "prompt": "a", "max_tokens": 2}
    whole = stack.post("/v1/completions", body)
    stream = stack.post("/v1/completions", body | {"stream": True})
    first = json.loads(stream.text.split("\n\n")[0].removeprefix("data: "))

    for response, answer in ((whole, whole.json()), (stream, first)):
        name = response.headers["x-serve-app-request-id"]
        assert len(name) == 32
        assert answer["id"] == f"cmpl-{name}"


def test_a_whole_answer_tells_its_wait_and_its_first_token(stack: Stack) -> None:
    began = time.monotonic()
    answer = stack.post("/v1/completions", {"model": TINY, "prompt": "a", "max_tokens": 40, "ignore_eos": True})
    took_ms = 1000 * (time.monotonic() - began)
    wait_ms, first_ms = (int(answer.headers[f"x-serve-app-{name}-ms"]) for name in ("wait", "first-token"))
    assert 0 <= wait_ms <= first_ms < took_ms


def test_a_client_s_x_request_id_comes_back(stack: Stack) -> None:
    response = stack.get("/v1/models", headers={"X-Request-Id": "trace-17"})

    assert response.headers["x-request-id"] == "trace-17"


def test_a_repeated_idempotency_key_repeats_the_answer(stack: Stack, batch_key: str) -> None:
    body = {"model": TINY, "prompt": "The river", "max_tokens": 8, "temperature": 1.0}
    key = {"Idempotency-Key": "e2e-repeat-1"}
    first = stack.post("/v1/completions", body, headers=key)
    again = stack.post("/v1/completions", body, headers=key)
    other_tenant = stack.post("/v1/completions", body, headers=key | stack.headers(batch_key))
    other_body = stack.post("/v1/completions", body | {"max_tokens": 9}, headers=key)

    assert first.status_code == again.status_code == other_tenant.status_code == 200
    assert again.content == first.content
    assert other_tenant.json()["id"] != first.json()["id"]
    assert other_body.status_code == 400
    assert other_body.json()["error"]["param"] == "Idempotency-Key"


def test_metrics_count_requests_and_tokens_by_tenant(stack: Stack, observer: Observer) -> None:
    def read() -> list[float]:
        labels = {"model": TINY, "tenant": "people"}
        names = ("serve_app_requests_total", "serve_app_prompt_tokens_total", "serve_app_completion_tokens_total")
        return [observer.value(name, **labels) for name in names]

    if stack.api_key != PEOPLE_KEY:
        missing("the external stack's tenant has another name")
    before = read()
    usage = stack.post("/v1/completions", {"model": TINY, "prompt": "The river", "max_tokens": 7}).json()["usage"]
    after = read()

    # as many as were made: the model may end its text before the seventh
    expected = [1, usage["prompt_tokens"], usage["completion_tokens"]]
    assert [b - a for a, b in zip(before, after, strict=True)] == expected


def test_metrics_are_prometheus_text_and_tell_the_slots(stack: Stack, observer: Observer) -> None:
    response = stack.get("/metrics")
    families = list(text_string_to_metric_families(response.text))
    names = {family.name for family in families}
    samples = [sample for family in families for sample in family.samples]
    for name in {sample.name for sample in samples}:  # as the tests look at them; in words, since NaN equals nothing
        assert str(samples_of(response.text, name, {})) == str([one for one in samples if one.name == name])

    assert response.headers["content-type"].startswith("text/plain")
    assert {
        "serve_app_requests",
        "serve_app_queue_wait_seconds",
        "serve_app_time_to_first_token_seconds",
        "serve_app_waiting",
        "serve_app_slots",
        "serve_app_engine_running_sequences",
    } <= names
    assert observer.value("serve_app_slots", model=TINY, state="total") == 64


def test_a_scrape_has_the_ledger_and_the_batches(stack: Stack, observer: Observer) -> None:
    assert [observer.value("serve_app_up", part=part) for part in ("quota_actor", "store")] == [1, 1]
    assert observer.value("serve_app_replicas", model=TINY, state="running") == 1
    granted = observer.value("serve_app_replica_memory_bytes", model=TINY, kind="granted")
    assert 0 < granted <= observer.value("serve_app_gpu_memory_bytes", kind="granted")
    assert 0 <= observer.value("serve_app_kv_used_ratio", model=TINY) <= 1


def test_no_key_and_no_unknown_name_is_in_the_metrics(stack: Stack, observer: Observer) -> None:
    """Labels come from the configuration, so a client cannot make them grow."""
    wrong = {"Authorization": "Bearer sk-a-wrong-key-0123456789"}
    assert stack.post("/v1/completions", {"model": TINY}, headers=wrong).status_code == 401
    assert stack.post("/v1/completions", {"model": "a-name-nobody-knows", "prompt": "a"}).status_code == 404
    reported = observer.text()

    assert "sk-" not in reported
    assert "nobody-knows" not in reported


def _titles(pids: list[int]) -> list[str]:
    """Names and command lines of these processes and all that they have started."""
    found: set[psutil.Process] = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {psutil.Process(pid), *psutil.Process(pid).children(recursive=True)}
    titles = []
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # or one that has ended and was not waited for
            titles.append(" ".join([process.name(), *process.cmdline()])[:200])
    return titles


def test_every_open_port_is_on_loopback_or_refuses(stack: Stack) -> None:
    """Of all processes of the instance: the node, Serve, HAProxy, the engines and what they started."""
    if stack.cluster is None:
        missing("the external stack's ports are not known")
    assert stack.cluster is not None
    listeners = stack.cluster.listeners()
    names = {one.process for one in listeners}

    assert {"haproxy", "gcs_server", "raylet"} <= names
    titles = _titles(stack.cluster.pids())
    assert any(word in title for title in titles for word in ENGINE_CORE), titles  # whether it listens or not
    serves = [one for one in listeners if not one.is_loopback and not _refuses_grpc(one) and not _refuses_http(one)]
    assert serves == []


def test_every_way_in_asks_for_the_key(stack: Stack) -> None:
    """Not the endpoint alone: the router replicas' own HTTP ports and Serve's fallback proxy as well."""
    if stack.cluster is None:
        missing("the external stack's ports are not known")
    assert stack.cluster is not None
    speaking = {}
    for listener in stack.cluster.listeners():
        if listener.process.startswith(HTTP_PROCESSES) and (status := http_status(listener.port)) is not None:
            speaking[listener.process, listener.port] = status

    assert ("haproxy", stack.cluster.instance.http_port) in speaking
    assert any(name.startswith("ray::ServeReplica") for name, _ in speaking)
    assert set(speaking.values()) == {401}


def test_ray_asks_for_its_token(stack: Stack) -> None:
    if stack.cluster is None:
        missing("the external stack's ports are not known")
    assert stack.cluster is not None
    port = int(stack.cluster.address.rpartition(":")[2])

    assert _grpc_status(port, "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo") is grpc.StatusCode.UNAUTHENTICATED


def _refuses_grpc(listener: Listener) -> bool:
    return _grpc_status(listener.port, "/ray.serve.ASGIService/HandleRequest") is grpc.StatusCode.UNAUTHENTICATED


def _refuses_http(listener: Listener) -> bool:
    return http_status(listener.port) == 401


def _grpc_status(port: int, method: str) -> grpc.StatusCode:
    """How a call without a token is answered."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(b"", timeout=patient(PROBE_S))
        except grpc.RpcError as error:
            status: grpc.StatusCode = error.code()
            return status
    return grpc.StatusCode.OK


def test_a_new_certificate_would_reach_haproxy(stack: Stack) -> None:
    """Serve chooses the place of the socket over which it is handed over; see tests/system/test_tls.py."""
    if stack.cluster is None:
        missing("the external stack's files are not known")
    assert [admin.is_socket() for admin in Path(stack.cluster.instance.run_dir).glob(ADMIN_SOCKETS)] == [True]


def test_haproxy_takes_the_routers_themselves_for_healthy(stack: Stack) -> None:
    """Else all traffic goes by Serve's fallback proxy, which answers nearly as they do."""
    if stack.cluster is None:
        missing("the external stack's files are not known")
    (admin,) = Path(stack.cluster.instance.run_dir).glob(ADMIN_SOCKETS)
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(patient(PROBE_S))
        link.connect(str(admin))
        link.sendall(b"show stat\n")
        text = b"".join(iter(lambda: link.recv(65536), b"")).decode()
    rows = list(csv.DictReader(text.removeprefix("# ").splitlines()))
    servers = [row for row in rows if row["svname"] not in ("FRONTEND", "BACKEND") and row["bck"] == "0"]
    assert servers
    assert {row["svname"]: row["status"] for row in servers if row["status"] != "UP"} == {}
