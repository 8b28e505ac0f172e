"""Service levels at the edge: every generation of a class that has one is counted once, by how it was served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.core.receipts import SloVerdict
from tests.fakes.asgi_client import BATCH_KEY, CHAT, Client, ask, running
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, SOON_S
from tests.http.test_app_receipts import check, leave, receipts

EASY = {"ttft_slo_s": 60.0, "itl_slo_s": 60.0}
LOOKS_AWAY_S = 0.1  # of a client, at least: however busy the machine is, the end comes no sooner after the last token
NEVER = 1e-9  # s: no token comes as soon


def levels(**classes: dict[str, float]) -> dict[str, Any]:
    return {"admission": {"classes": classes}}


def counted(client: Client) -> tuple[float, float, dict[str, float], float]:
    """Offered, met, missed by reason, and tokens of those met, of all classes."""

    def reported(name: str) -> float:
        return sum(client.figures(f"serve_app_{name}_total").values())

    missed = {reason: count for (reason,), count in client.figures("serve_app_slo_missed_total", "reason").items()}
    return reported("slo_offered"), reported("slo_met"), missed, reported("goodput_tokens")


def test_what_keeps_its_level_is_goodput_by_class() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await client.post(ask("p", 7))
        await client.post(ask("p", 5, stream=False, n=2))
        await client.post(ask("p", 3, priority="high"))  # has no level
        assert counted(client) == (2, 2, {}, 17)
        assert client.figures("serve_app_goodput_tokens_total", "priority", "model") == {("normal", "sim"): 17}
        first, two, other = receipts(client)
        assert (first.slo, two.slo, other.slo) == (SloVerdict.MET, SloVerdict.MET, None)
        assert (first.ttft_slo_s, first.itl_slo_s, other.ttft_slo_s) == (60.0, 60.0, None)
        assert first.itl_s is not None
        assert first.longest_gap_s is not None
        assert 0 < first.itl_s <= first.longest_gap_s
        assert two.itl_s is not None
        assert two.longest_gap_s is None  # an answer that comes whole shows no single token

    check(scenario, **levels(normal=EASY))


@pytest.mark.parametrize(
    ("level", "more", "reason"),
    [
        ({"ttft_slo_s": NEVER}, {}, "ttft"),
        ({"ttft_slo_s": 60.0, "itl_slo_s": NEVER}, {}, "itl"),
        ({"ttft_slo_s": NEVER, "itl_slo_s": NEVER}, {"stream": False}, "ttft"),
        ({"ttft_slo_s": NEVER}, {"stream": False}, "ttft"),
        ({"itl_slo_s": NEVER}, {"stream": False}, "itl"),
    ],
)
def test_what_misses_its_level_is_counted_by_why_and_is_no_goodput(
    level: dict[str, float], more: dict[str, Any], reason: str
) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        assert (await client.post(ask("p", 7, **more))).status == 200
        assert counted(client) == (1, 0, {reason: 1}, 0)

    check(scenario, **levels(normal=level))


def test_a_refusal_and_a_lost_engine_are_misses_and_a_wrong_request_is_not_offered() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await client.post(ask(""))  # the engine refuses it
        await client.post(ask("p", priority="no"))
        await client.request("POST", CHAT, b"{")
        await client.post({"model": "sim", "prompt": "p"}, path="/tokenize")
        assert counted(client) == (0, 0, {}, 0)
        task, _ = await running(client, n=4)
        assert (await client.post(ask("p"), headers={"X-Deadline-Ms": "20"})).status == 429
        client.model.replica_set.info = None  # no engine is known that could go on
        cluster.kill("r1")
        await task
        assert counted(client) == (2, 0, {"refused": 1, "failed": 1}, 0)

    check(scenario, **levels(normal=EASY))


def test_who_leaves_while_all_is_well_is_offered_and_neither_kept_nor_missed() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task, _ = await running(client)
        await leave(task)
        assert counted(client) == (1, 0, {}, 0)
        task, _ = await running(client, n=4)
        waits = client.posting(ask("p"), key=BATCH_KEY)
        await turns(20)
        await leave(waits)  # its class has a bound that was over before
        await leave(task)
        assert counted(client) == (3, 0, {"ttft": 1}, 0)

    check(scenario, **levels(normal=EASY, low={"ttft_slo_s": NEVER}))


def test_a_repeated_answer_is_not_served_again() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        for _ in range(2):
            await client.post(ask("p", 7), headers={"Idempotency-Key": "one"})
        assert counted(client) == (1, 1, {}, 7)

    check(scenario, **levels(normal=EASY))


def test_levels_change_while_requests_run() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        client = await Client(cluster, **levels(normal=EASY)).start()
        settings = client.edge.settings
        admission = type(settings.admission).model_validate(levels(normal={"ttft_slo_s": NEVER})["admission"])
        client.edge.configure(settings.model_copy(update={"admission": admission}))
        await client.post(ask("p", 7))
        assert counted(client) == (1, 0, {"ttft": 1}, 0)

    run(scenario)


def test_tokens_are_timed_as_they_come_and_not_as_a_client_reads_them() -> None:
    """The last of them is there long before this client takes the first."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        client = await Client(cluster, **levels(normal=EASY)).start()

        async def wait(reply: Any) -> None:
            if len(reply.chunks) == 1:
                await until(lambda: not cluster["r1"].work, SOON_S, "the engine is done")
                await asyncio.sleep(LOOKS_AWAY_S)  # a client that does not read for so long

        await client.post(ask("p", LONG // 100), reading=wait)
        (found,) = receipts(client)
        assert found.itl_s is not None
        assert found.first_token_s is not None
        assert found.first_token_s + found.itl_s * (LONG // 100 - 1) <= found.total_s - LOOKS_AWAY_S

    run(scenario, model(slots=4))


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"prompt": ["p", "q"]}])
def test_the_first_token_of_a_whole_answer_is_its_engine_s_first(more: dict[str, Any]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task = client.posting({**ask("p", 50, stream=False), **more})
        thawed = await frozen_after_the_first_token(cluster)
        assert (await task).status == 200
        (found,) = receipts(client)
        assert found.first_token_s is not None
        assert found.itl_s is not None
        assert found.arrived + found.first_token_s < thawed < found.arrived + found.total_s
        assert client.figures("serve_app_time_to_first_token_seconds_count") == {(): 1}
        reported = client.figures("serve_app_time_to_first_token_seconds_sum")
        assert reported == {(): pytest.approx(found.first_token_s)}

    check(scenario, **levels(normal=EASY))


async def frozen_after_the_first_token(cluster: FakeCluster) -> float:
    """Freeze the engine with its next token, for so long that the router knows; when it goes on."""
    await until(lambda: cluster["r1"].load.generated_tokens > 0, SOON_S, "the first token")
    cluster["r1"].freeze()
    await asyncio.sleep(LOOKS_AWAY_S)  # milliseconds would do: all runs in this process
    cluster["r1"].thaw()
    return asyncio.get_running_loop().time()


def test_who_leaves_a_whole_answer_after_a_first_token_in_time_has_missed_nothing() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task = client.posting(ask("p", LONG, stream=False))
        thawed = await frozen_after_the_first_token(cluster)
        await leave(task)
        (found,) = receipts(client)
        assert found.first_token_s is not None
        assert found.arrived + found.first_token_s < thawed
        assert client.figures("serve_app_time_to_first_token_seconds_count") == {(): 1}
        assert counted(client) == (1, 0, {}, 0)

    check(scenario, **levels(normal=EASY))


def test_who_leaves_a_whole_answer_whose_first_token_is_late_has_missed_it() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        cluster["r1"].freeze()
        task = client.posting(ask("p", LONG, stream=False))
        await until(lambda: cluster["r1"].work > 0, SOON_S, "the request runs")
        await leave(task)
        cluster["r1"].thaw()
        assert counted(client) == (1, 0, {"ttft": 1}, 0)

    check(scenario, **levels(normal={"ttft_slo_s": NEVER}))
