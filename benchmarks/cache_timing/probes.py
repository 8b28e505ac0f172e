"""An attacker's probes: how long a prompt's first token takes after somebody has, or has not, sent the same prompt.

A probe has two requests. The first one, the priming, is of the other tenant (`Cell.BETWEEN_...`) or of the attacker
itself (`Cell.WITHIN_...`), with the probed prompt (`..._SAME`) or another one of its length (`..._OTHER`). The second
one is the attacker's, and measured. So the engine does the same work before each measurement, and the cells differ in
nothing but whose tenant had the prompt.

Invariant: every prompt is new to all tenants; the four cells are measured in turn, in an order drawn anew each time, so
that whatever slows the machine slows all of them.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from benchmarks.common.arms import BenchmarkError

TOKEN_IDS = (16, 240)  # of plain bytes in the built-in model's vocabulary
REQUEST_S = 120.0  # no request here takes a hundredth of it
# a receipt is written once the client has the last byte
RECEIPT_TRIES = 50
RECEIPT_PAUSE_S = 0.02


class Cell(enum.StrEnum):
    """Whose tenant sent which prompt before the attacker's request."""

    BETWEEN_SAME = "between, same prompt"
    BETWEEN_OTHER = "between, other prompt"
    WITHIN_SAME = "within, same prompt"
    WITHIN_OTHER = "within, other prompt"

    @property
    def within(self) -> bool:
        return self in (Cell.WITHIN_SAME, Cell.WITHIN_OTHER)

    @property
    def same(self) -> bool:
        return self in (Cell.BETWEEN_SAME, Cell.WITHIN_SAME)


@dataclass(frozen=True, slots=True)
class Probe:
    """One measured request.

    Args:
        client_ms: until the first byte of its stream, by the attacker's clock.
        receipt_ms: until the first token, as its receipt tells: without the network, to the microsecond.
        cached: prompt tokens found in the prefix cache, by the answer's own usage.
        replica: where it ran.
        followed: whether it ran where the priming request had run.
    """

    client_ms: float
    receipt_ms: float
    cached: int
    replica: str
    followed: bool = False


class Prober:
    """Sends the requests of both tenants to one endpoint, one after the other.

    Args:
        owner_key: of the tenant whose prompts the attacker wants to know; `attacker_key`: of the attacker.
        prompt_tokens: of every prompt.
        transport: in place of the network.
    """

    def __init__(
        self,
        url: str,
        model: str,
        owner_key: str,
        attacker_key: str,
        prompt_tokens: int,
        rng: np.random.Generator,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._model = model
        self._owner = owner_key
        self._attacker = attacker_key
        self._prompt_tokens = prompt_tokens
        self._rng = rng
        self._http = httpx.Client(base_url=url, timeout=REQUEST_S, trust_env=False, transport=transport)

    def probe(self, cell: Cell) -> Probe:
        """Raises BenchmarkError: a request failed."""
        prompt = self.prompt()
        other = self.prompt()
        before = self.ask(self._attacker if cell.within else self._owner, prompt if cell.same else other)
        found = self.ask(self._attacker, prompt)
        return Probe(
            found.client_ms, found.receipt_ms, found.cached, found.replica, followed=found.replica == before.replica
        )

    def prompt(self) -> list[int]:
        """Token ids; no other prompt begins with these."""
        return [int(number) for number in self._rng.integers(*TOKEN_IDS, self._prompt_tokens)]

    def ask(self, key: str, prompt: list[int]) -> Probe:
        """One streamed request, read to its end. Raises as `probe`."""
        headers = {"Authorization": f"Bearer {key}"}
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        first_s = 0.0
        text = b""
        try:
            with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                for piece in answer.iter_raw():
                    first_s = first_s or time.perf_counter() - began
                    text += piece
            if answer.status_code != 200:
                raise BenchmarkError(f"{answer.status_code}: {text[:300]!r}")
            receipt = self._receipt(answer.headers["x-serve-app-request-id"], headers)
        except httpx.HTTPError as error:
            raise BenchmarkError(f"no answer: {error!r}") from error
        return Probe(first_s * 1e3, receipt["first_token_s"] * 1e3, cached_tokens(text), receipt["replica_id"])

    def _receipt(self, request_id: str, headers: dict[str, str]) -> dict[str, Any]:
        for _ in range(RECEIPT_TRIES):
            answer = self._http.get(f"/admin/requests/{request_id}", headers=headers)
            if answer.status_code == 200:
                found: dict[str, Any] = answer.json()
                return found
            time.sleep(RECEIPT_PAUSE_S)  # bound: RECEIPT_TRIES of them
        raise BenchmarkError(f"no receipt: {answer.status_code}: {answer.text[:300]}")

    def close(self) -> None:
        self._http.close()


def cached_tokens(stream: bytes) -> int:
    """The cached tokens that the last event with a usage names. Raises BenchmarkError: there is none."""
    for event in reversed(stream.split(b"\n\n")):
        if event.startswith(b"data: {"):
            usage = json.loads(event.removeprefix(b"data: ")).get("usage")
            if usage is not None:
                return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    raise BenchmarkError(f"the stream names no usage: {stream[-300:]!r}")


def collect(
    prober: Prober, rounds: int, rng: np.random.Generator, on_round: Callable[[int], None] = lambda _: None
) -> dict[Cell, list[Probe]]:
    """The probes of each cell, one of each a round. Raises as `Prober.probe`."""
    found: dict[Cell, list[Probe]] = {cell: [] for cell in Cell}
    cells = list(Cell)
    for number in range(rounds):
        for index in rng.permutation(len(cells)):
            found[cells[index]].append(prober.probe(cells[index]))
        on_round(number + 1)
    return found
