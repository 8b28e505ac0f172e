"""The plan of kills, the account of a batch's rows, and what counts as there again, on files and looks made by hand."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.batch_crash.account import EngineCounts, account, rerun_share
from benchmarks.batch_crash.main import FULL, QUICK, configuration, options_of, shape_of
from benchmarks.batch_crash.plan import KINDS, LAST_SHARE, Victim, kills_of
from benchmarks.batch_crash.victims import by_victim, victim_of
from benchmarks.batch_crash.watch import running_of
from benchmarks.common.arms import BenchmarkError
from benchmarks.common.batches import PROMPT_WORDS, input_file, persisting, rows_of, text_of, undisturbed
from serve_app.settings import parse

EXPECTED = {"row-1": " one", "row-2": " two", "row-3": " three"}


def answered(custom_id: str, text: str, status: int = 200) -> str:
    body: dict[str, Any] = {"choices": [{"index": 0, "text": text}]}
    response = {"status_code": status, "request_id": "r", "body": body}
    return json.dumps({"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": None})


def failed(custom_id: str) -> str:
    return json.dumps({"id": "batch_req_2", "custom_id": custom_id, "response": None, "error": {"code": "x"}})


def metrics(**prompt_tokens: float) -> str:
    lines = []
    for replica, value in prompt_tokens.items():
        lines.append(f'serve_app_engine_prompt_tokens_total{{model="tiny",replica="{replica}"}} {value}')
        lines.append(f'serve_app_engine_steps_total{{model="tiny",replica="{replica}"}} 9.0')
    return "\n".join(lines) + "\n"


@given(st.integers(0, 10_000), st.integers(len(KINDS), 120), st.integers(20, 2_000))
def test_every_kind_is_killed_and_the_moments_are_of_the_seed(seed: int, count: int, rows: int) -> None:
    kills = kills_of(seed, count, rows)
    assert kills == kills_of(seed, count, rows)
    assert len(kills) == count
    assert {kill.victim for kill in kills} == set(KINDS)
    moments = [kill.after_rows for kill in kills]
    assert moments == sorted(moments)
    assert moments[0] >= 1
    assert moments[-1] <= rows * LAST_SHARE


def test_other_seeds_kill_otherwise() -> None:
    assert kills_of(1, 10, 1_000) != kills_of(2, 10, 1_000)


def test_a_whole_batch_is_clean() -> None:
    found = account(EXPECTED, "\n".join(answered(name, text) for name, text in EXPECTED.items()), "")
    assert found.is_clean
    assert found.as_json() == {"missing": 0, "duplicated": 0, "failed": 0, "wrong": 0, "unknown": 0}


def test_each_mistake_is_found_by_its_custom_id() -> None:
    output = "\n".join(
        [answered("row-1", " one"), answered("row-1", " one"), answered("row-2", " 2"), answered("x", "")]
    )
    found = account(EXPECTED, output + "\n", "")
    assert (found.missing, found.duplicated, found.wrong, found.unknown) == (["row-3"], ["row-1"], ["row-2"], ["x"])
    assert not found.is_clean
    assert found.as_json()["samples"]["missing"] == ["row-3"]


def test_a_row_in_both_files_is_there_twice_and_an_answer_without_success_is_wrong() -> None:
    output = "\n".join([answered("row-1", " one"), answered("row-2", " two", status=500), answered("row-3", " three")])
    found = account(EXPECTED, output, failed("row-3"))
    assert (found.duplicated, found.failed, found.wrong, found.missing) == (["row-3"], ["row-3"], ["row-2"], [])


def test_a_cut_line_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"delimiter|Expecting|Unterminated"):
        account(EXPECTED, answered("row-1", " one")[:-4], "")
    with pytest.raises(ValueError, match="custom id"):
        account(EXPECTED, '{"id": "batch_req_1"}', "")


def test_a_dead_engines_last_count_stays_in_the_sum() -> None:
    counts = EngineCounts(prompt_tokens=6)
    counts.look(metrics(a=60.0, b=30.0))
    counts.look(metrics(b=54.0, c=6.0))
    assert counts.begun == 10 + 9 + 1
    assert counts.engines == 3
    assert rerun_share(counts.begun, 19) == pytest.approx(1 / 19, abs=1e-4)
    assert rerun_share(18, 19) == 0.0


def test_the_rows_have_texts_and_answers_of_their_own() -> None:
    rows = rows_of(20, (4, 8), seed=3)
    assert rows == rows_of(20, (4, 8), seed=3)
    (model,) = parse(configuration(QUICK, None)).models
    answers = asyncio.run(undisturbed(rows, model))
    assert set(answers) == {row.custom_id for row in rows}
    assert len(set(answers.values())) == len(rows)
    assert answers == asyncio.run(undisturbed(list(reversed(rows)), model))
    assert all(len(row.prompt.split()) == PROMPT_WORDS for row in rows)
    lines = [json.loads(line) for line in input_file(rows, model.name).decode().splitlines()]
    assert [line["custom_id"] for line in lines] == [row.custom_id for row in rows]
    assert {row.max_tokens for row in rows} <= set(range(4, 9))
    assert text_of({"choices": [{"text": "t"}]}) == "t"


def test_only_running_replicas_with_a_process_can_be_killed() -> None:
    def replica(name: str, state: str, pid: int | None) -> dict[str, Any]:
        return {"replica_id": name, "state": state, "pid": pid}

    deployments = {
        "Router": {"replicas": [replica("a", "RUNNING", 1), replica("b", "STARTING", 2)]},
        "engine-tiny": {"replicas": [replica("c", "RUNNING", 3), replica("d", "RUNNING", None)]},
        "BatchWorker": {"replicas": [replica("e", "RUNNING", 5)]},
        "Other": {"replicas": [replica("f", "RUNNING", 6)]},
    }
    found = by_victim(running_of({"applications": {"serve_app": {"deployments": deployments}}}))
    assert found == {Victim.WORKER: [5], Victim.ROUTER: [1], Victim.ENGINE: [3]}
    assert victim_of("Other") is None
    assert running_of({"applications": {}}) == {}


@pytest.mark.parametrize("store", [None, "postgresql+psycopg://postgres@/db?host=/tmp/x"])
def test_what_is_measured_is_a_configuration(store: str | None) -> None:
    settings = parse(configuration(FULL, store))
    (model,) = settings.models
    assert (model.max_num_seqs, model.replicas.max_replicas, settings.router.replicas) == (1, 2, 2)
    assert settings.batch.workers == 1


def test_quick_kills_ten_times_and_the_whole_a_hundred() -> None:
    assert shape_of(options_of(["--quick"])).kills == 10
    assert shape_of(options_of([])).kills == 100
    assert shape_of(options_of(["--quick", "--kills", "7", "--rows", "50"])) != QUICK
    chosen = Counter(kill.victim for kill in kills_of(1, 6, 100, options_of(["--only", "router"]).only))
    assert chosen == {Victim.ROUTER: 6}


def test_a_call_is_repeated_while_the_stack_is_away_and_not_when_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.common.batches.RETRY_S", 0.0)
    request = httpx.Request("GET", "http://127.0.0.1/v1/batches/b")
    away: list[Exception] = [
        openai.APIConnectionError(request=request),
        openai.InternalServerError("away", response=httpx.Response(503, request=request), body=None),
    ]

    def call() -> str:
        if away:
            raise away.pop()
        return "batch"

    assert persisting(call, 60.0) == "batch"
    away.append(openai.NotFoundError("none", response=httpx.Response(404, request=request), body=None))
    with pytest.raises(BenchmarkError, match="404"):
        persisting(call, 60.0)
    away += [openai.APIConnectionError(request=request)]
    with pytest.raises(BenchmarkError, match="no answer within"):
        persisting(call, -1.0)
