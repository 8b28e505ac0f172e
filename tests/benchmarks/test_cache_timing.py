"""The timing test tells a cache that is shared from one that is not, on times made up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.cache_timing.main import PROMPT_TOKENS, ROUNDS, plan_of
from benchmarks.cache_timing.probes import Cell, Probe, Prober, cached_tokens, collect
from benchmarks.cache_timing.report import verdict
from benchmarks.common.arms import BenchmarkError

MISS_MS = 100.0
HIT_MS = 20.0
NOISE_MS = 5.0
FAKE_ROUNDS = 60


def made_up(hits: Mapping[Cell, float], moves: Mapping[Cell, float] | None = None) -> dict[Cell, list[Probe]]:
    """Probes of which this share of a cell is fast; and this share of a cell runs where the priming request ran."""
    rng = np.random.default_rng(3)
    found: dict[Cell, list[Probe]] = {cell: [] for cell in Cell}
    for cell in Cell:
        for _ in range(FAKE_ROUNDS):
            ms = (HIT_MS if rng.random() < hits.get(cell, 0.0) else MISS_MS) + rng.normal(0, NOISE_MS)
            cached = 1792 if cell is Cell.WITHIN_SAME else 0
            followed = bool(rng.random() < (moves or {}).get(cell, 0.5))
            found[cell].append(Probe(ms, ms - 3, cached, f"r{rng.integers(2)}", followed))
    return found


def judged(hits: Mapping[Cell, float], moves: Mapping[Cell, float] | None = None) -> tuple[bool, bool]:
    reported: dict[str, Any] = verdict(made_up(hits, moves), np.random.default_rng(4))
    json.dumps(reported, allow_nan=False)
    return reported["within_tells"], reported["between_tells"]


HOME = {Cell.WITHIN_SAME: 1.0}


def test_caches_of_each_tenant_tell_within_it_only() -> None:
    assert judged({Cell.WITHIN_SAME: 1.0}, HOME) == (True, False)


def test_a_shared_cache_tells_between_tenants_too_even_if_it_hits_seldom() -> None:
    assert judged({Cell.WITHIN_SAME: 1.0, Cell.BETWEEN_SAME: 0.4}, HOME) == (True, True)


def test_a_probe_that_was_routed_elsewhere_hides_no_cache_and_no_leak() -> None:
    """Routing by key is a preference: one probe within a tenant may miss; between tenants one hit is too many."""
    found = made_up({Cell.WITHIN_SAME: 1.0}, HOME)
    found[Cell.WITHIN_SAME][0] = Probe(MISS_MS, MISS_MS, 0, "r1")
    reported = verdict(found, np.random.default_rng(4))
    assert (reported["within_tells"], reported["between_tells"]) == (True, False)
    found[Cell.BETWEEN_SAME][0] = Probe(MISS_MS, MISS_MS, 128, "r1")
    assert verdict(found, np.random.default_rng(4))["between_tells"]


def test_no_cache_tells_nothing() -> None:
    assert judged({}, HOME) == (False, False)


def test_a_place_that_goes_by_the_other_tenant_s_prompt_tells() -> None:
    assert judged({Cell.WITHIN_SAME: 1.0}, {**HOME, Cell.BETWEEN_SAME: 1.0}) == (True, True)


def test_the_power_is_of_shares_of_what_is_saved_within_a_tenant() -> None:
    reported = verdict(made_up({Cell.WITHIN_SAME: 1.0}), np.random.default_rng(4))
    for clock in reported["clocks"].values():
        assert clock["within"]["shift"] == pytest.approx(HIT_MS - MISS_MS, abs=NOISE_MS)
        assert list(clock["power"]) == ["0.01", "0.02", "0.05", "0.1"]
        assert clock["power"]["0.1"] > 0.99


def test_each_round_has_every_cell_once_and_no_prompt_twice() -> None:
    """The owner's key primes between tenants, the attacker's within its own; the probe is always the attacker's."""
    asked: list[tuple[str, list[int]]] = []

    class Recorded(Prober):
        def ask(self, key: str, prompt: list[int]) -> Probe:
            asked.append((key, prompt))
            return Probe(1.0, 1.0, 0, "r1")

    rng = np.random.default_rng(5)
    prober = Recorded("http://127.0.0.1:1", "tiny", "owner", "attacker", 50, rng)
    found = collect(prober, 3, rng)
    prober.close()
    assert {cell: len(probes) for cell, probes in found.items()} == dict.fromkeys(Cell, 3)
    pairs = list(zip(asked[::2], asked[1::2], strict=True))
    assert all(key == "attacker" for _, (key, _) in pairs)
    kinds = [(primer, primed == probed) for (primer, primed), (_, probed) in pairs]
    assert sorted(kinds) == sorted([(who, same) for who in ("owner", "attacker") for same in (True, False)] * 3)
    assert len({tuple(probed) for _, (_, probed) in pairs}) == len(pairs)


def test_cached_tokens_are_those_of_the_last_usage() -> None:
    event = {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}}
    stream = b'data: {"choices":[{"text":"a"}]}\n\ndata: ' + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
    assert cached_tokens(stream) == 7
    assert cached_tokens(b'data: {"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}\n\n') == 0
    with pytest.raises(BenchmarkError, match="no usage"):
        cached_tokens(b"data: [DONE]\n\n")


def test_a_failed_request_ends_the_run_with_its_reason() -> None:
    full = httpx.MockTransport(lambda _: httpx.Response(429, stream=httpx.ByteStream(b"full")))
    prober = Prober("http://127.0.0.1:1", "tiny", "owner", "attacker", 5, np.random.default_rng(6), full)
    with pytest.raises(BenchmarkError, match="429: b'full'"):
        prober.probe(Cell.WITHIN_SAME)
    prober.close()


def test_the_command_line_chooses_rounds_and_replicas() -> None:
    assert plan_of([]).rounds == ROUNDS
    assert (plan_of(["--replicas", "2"]).replicas, plan_of([]).prompt_tokens) == ((2,), PROMPT_TOKENS)
    with pytest.raises(SystemExit):
        plan_of(["--replicas", "0"])
