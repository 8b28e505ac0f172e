"""`serve-app drain` under load, on real processes: no request fails, and each answer is the undisturbed one."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from serve_app.engine.simulated.text import text_key, text_of
from tests.cluster.placement_lab import Lab
from tests.requires import requires
from tests.waiting import slowness

requires("linux")

pytestmark = pytest.mark.long  # four nodes' starts; test_model_changes drains a replica, too

TOKENS = 400  # 8 s at the engine's pace: longer than the drains, on a quiet machine
WITHIN_S = 2.0
CLIENTS = 6
PROMPT = "where am I?"  # of `Lab.complete`


MODEL: dict[str, Any] = {
    "name": "sim",
    "engine": "simulated",
    "memory_gb": 20,
    "gpus_per_rank": 0.2,
    "cpus_per_rank": 0.2,
    "max_num_seqs": 2 * CLIENTS,
    "simulated": {"decode_step_s": 0.02},
    "replicas": {"min_replicas": 2, "max_replicas": 2},
}


def streamed(nodes: Lab, tokens: int) -> str:
    """The text of a stream that ends as it should."""
    with nodes.complete("sim", tokens=tokens, stream=True) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines(decode_unicode=True) if line]
    assert events[-1] == "[DONE]", events[-2:]
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def whole(nodes: Lab, tokens: int) -> str:
    answer = nodes.complete("sim", tokens=tokens)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def begun(nodes: Lab, pool: ThreadPoolExecutor) -> Begun:
    """Streams and whole answers that run on both replicas."""
    tokens = int(TOKENS * slowness())
    answers = [pool.submit(kind, nodes, tokens) for _ in range(CLIENTS) for kind in (streamed, whole)]

    def all_run() -> bool:
        used = [one["slots_used"] for one in nodes.ask("quota")["engines"] if one["model"] == "sim"]
        return sum(used) == 2 * CLIENTS and all(used)

    nodes.until(all_run, "all of them run", lambda: nodes.ask("quota")["engines"])
    return Begun(tokens, answers)


@dataclass(frozen=True)
class Begun:
    """Answers on their way, each of so many tokens."""

    tokens: int
    answers: list[Future[str]]

    def check(self) -> None:
        expected = text_of(text_key(0, 0, PROMPT), 0, self.tokens)
        assert [answer.result() == expected for answer in self.answers] == [True] * len(self.answers)


def test_a_replica_that_is_drained_under_load_ends_and_no_answer_is_lost_or_changed(nodes: Lab) -> None:
    nodes.add("a", 1)
    nodes.deploy([MODEL])
    nodes.placed("sim", 2)
    before = {replica["id"] for replica in nodes.status("sim")["replicas"]}
    with ThreadPoolExecutor(2 * CLIENTS) as pool:
        answers = begun(nodes, pool)
        leaves = min(before)
        (row,) = nodes.ask("drain_replica", replica=leaves, within_s=WITHIN_S)
        answers.check()
    assert row["moved"] > 0
    assert row["running"] == 0
    nodes.placed("sim", 2)
    assert leaves not in {replica["id"] for replica in nodes.status("sim")["replicas"]}


def test_a_node_that_is_drained_within_seconds_loses_no_answer(nodes: Lab) -> None:
    """As at a spot notice: the deadline is nearer than a replica's `drain_s`."""
    nodes.add("a", 1)
    nodes.deploy([MODEL | {"gpus_per_rank": 0.6}])  # one on each node
    nodes.add("b", 1)
    nodes.placed("sim", 2)
    with ThreadPoolExecutor(2 * CLIENTS) as pool:
        answers = begun(nodes, pool)
        nodes.add("spare", 1)
        rows = nodes.ask("drain", name="b", within_s=WITHIN_S)
        answers.check()
    assert sum(row["moved"] for row in rows) > 0


def test_a_replica_that_leaves_at_a_change_moves_what_outlasts_its_drain(nodes: Lab) -> None:
    nodes.add("a", 1)
    short = MODEL | {"drain_s": WITHIN_S, "replicas": {"min_replicas": 2, "max_replicas": 2, "max_surge_percent": 100}}
    nodes.deploy([short])
    nodes.placed("sim", 2)
    before = {replica["id"] for replica in nodes.status("sim")["replicas"]}
    with ThreadPoolExecutor(2 * CLIENTS) as pool:
        answers = begun(nodes, pool)
        nodes.deploy([short | {"max_num_seqs": 2 * CLIENTS + 1}])  # replaces all replicas
        answers.check()
    nodes.placed("sim", 2)
    assert before.isdisjoint({replica["id"] for replica in nodes.status("sim")["replicas"]})
