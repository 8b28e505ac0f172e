"""Clients that do not wait for each other, in a process of their own, light because it shares a core with the server.

`python -m benchmarks.overload.open_loop` reads one JSON `Spec` from standard input, writes `begin` and `end` to
standard output at the edges of its measuring window and the result as one JSON line last, as
`benchmarks.common.loadgen` does.

Open loop: each request goes out at its moment, over an idle connection or a new one, whatever became of the others; its
times count from that moment, so a generator that is late itself is not hidden. A client whose first token has not come
within its group's patience closes its connection; one that is refused does not come back. With `clients` set it is a
closed loop instead: so many at a time, without patience. `play` does the same with requests that another module has
made (`benchmarks.endpoint.traffic`), and for that one, with `Load.staying` set, its clients each keep to a group, with
so many for each; who is refused waits its Retry-After and asks the same again, and its times count from the first time.

Invariant: every request that was sent ends as exactly one `Ended`, and none of them holds back another.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.common.loadgen import own_cpu_s
from benchmarks.common.output import write_json, write_line
from benchmarks.overload.offered_load import GROUPS, Label, Offer, endless, lengths, offers, request_bytes, text
from benchmarks.overload.open_loop_client import Client, Ended, Flight, Load

DRAIN_S = 90.0  # after the last arrival: nothing that was granted runs longer than a tenth of it
IDLE_S = 2.0  # of a connection that is used again; servers close theirs after five
CLOSED_MOST = 20_000  # requests of a closed loop, made beforehand: more than any machine here serves in one
RETRY_S = 1.0  # of a client that stays and was told no Retry-After
STILL_REFUSED = "still refused at the end"  # of a client who stays
HUNG = "hung"  # of a request that had not ended when the drain was over
MAX_SAMPLES = 5  # of failures: enough to see what went wrong


@dataclass(frozen=True, slots=True)
class Spec:
    """One run. `labels` has the fields of a `Label` for each group and tenant, `patience_s` a figure for each group.
    With other `texts` the same requests have other prompts: no prefix of another run is cached."""

    name: str
    host: str
    port: int
    model: str
    folder: str
    longest: int
    seed: int
    rate: float
    warmup_s: float
    window_s: float
    tail_s: float
    clients: int
    labels: dict[str, list[list[Any]]]
    patience_s: dict[str, float]
    texts: int = 0

    def load(self) -> Load:
        return Load(
            host=self.host,
            port=self.port,
            warmup_s=self.warmup_s,
            window_s=self.window_s,
            tail_s=self.tail_s,
            drain_s=DRAIN_S,
            clients=self.clients,
            patience_s=self.patience_s,
        )

    def offered(self) -> list[Offer]:
        """All requests of the run, in the order in which they are sent."""
        drawn_from = lengths(Path(self.folder), self.longest)
        if self.clients:
            return list(islice(endless(drawn_from, self.seed), CLOSED_MOST))
        return offers(drawn_from, self.rate, self.load().span_s, self.seed)

    def label(self, offer: Offer) -> Label:
        return Label(*self.labels[offer.group][offer.tenant])


@dataclass(slots=True)
class Run:
    """What all clients share. `on_edge` hears of the edges of the window, `begin` and `end`."""

    load: Load
    queue: Iterator[tuple[Offer, bytes]]
    loop: asyncio.AbstractEventLoop
    over: asyncio.Future[None]
    on_edge: Callable[[str], None]
    began: float = 0.0
    cpu_s: float = 0.0
    cut: bool = False  # nothing new is sent
    exhausted: bool = False  # before its time: a closed loop has sent all that was made for it
    flying: int = 0
    flights: list[Flight] = field(default_factory=list)
    idle: list[Client] = field(default_factory=list)
    connecting: set[asyncio.Task[Any]] = field(default_factory=set)
    by_group: dict[str, deque[tuple[Offer, bytes]]] = field(default_factory=dict)  # for clients who stay
    away: dict[int, tuple[Flight, bytes]] = field(default_factory=dict)  # refused, and coming again
    refusals: int = 0  # of those who stay

    def start(self) -> None:
        load = self.load
        self.began = self.loop.time()
        self.loop.call_later(load.warmup_s, self._open_window)
        self.loop.call_later(load.warmup_s + load.window_s, self._close_window)
        self.loop.call_later(load.span_s, self._cut)
        self.loop.call_later(load.span_s + load.drain_s, self._give_up)
        if load.closed:
            for group in [group for group, count in load.staying.items() for _ in range(count)]:
                self._next(group)
            for _ in range(load.clients):
                self._next()
        else:
            self._schedule()

    def _schedule(self) -> None:
        """Send what is due, then sleep until the next is: one timer, however many are to come."""
        for offer, data in self.queue:
            due = self.began + offer.at_s
            if due > self.loop.time():
                self.loop.call_at(due, self._send_and_go_on, offer, data, due)
                return
            self._send(offer, data, due)

    def _send_and_go_on(self, offer: Offer, data: bytes, due: float) -> None:
        self._send(offer, data, due)
        self._schedule()

    def _next(self, group: str = "") -> None:
        """Of a closed loop, of this group if any."""
        if self.cut:
            return
        waiting = self.by_group.setdefault(group, deque())
        while not waiting:
            made = next(self.queue, None)
            if made is None:
                self.exhausted = True
                self._cut()
                return
            offer, data = made
            self.by_group.setdefault(offer.group if group else group, deque()).append((offer, data))
        self._send(*waiting.popleft(), self.loop.time())

    def _send(self, offer: Offer, data: bytes, due: float) -> None:
        flight = Flight(offer, due, self.loop.time())
        self.flights.append(flight)
        self.flying += 1
        self._launch(flight, data)

    def _come_again(self, number: int) -> None:
        """A client that stays, after its Retry-After."""
        found = self.away.pop(number, None)
        if found is not None:
            self._launch(*found)

    def _launch(self, flight: Flight, data: bytes) -> None:
        now = self.loop.time()
        flight.data = data
        while self.idle:
            client = self.idle.pop()
            if now - client.idle_since < IDLE_S and not client.transport.is_closing():
                client.begin(flight, data)
                return
            client.transport.close()
        load = self.load
        new = Client(self)
        new.begin(flight, data)
        task = self.loop.create_task(self.loop.create_connection(lambda: new, load.host, load.port, ssl=load.tls))
        self.connecting.add(task)
        task.add_done_callback(lambda done: self._connected(done, flight))

    def _connected(self, task: asyncio.Task[Any], flight: Flight) -> None:
        self.connecting.discard(task)
        if error := task.exception():
            self.end(flight, Ended.FAILED, f"no connection: {error}")

    def end(self, flight: Flight, outcome: Ended, code: str = "") -> None:
        """The first end of a request counts."""
        if flight.ended:
            return
        if self.load.staying and outcome is Ended.REFUSED and not self.cut:
            self.refusals += 1
            number = flight.offer.number
            self.away[number] = flight, flight.data
            self.loop.call_later(flight.retry_s or RETRY_S, self._come_again, number)
            return
        flight.outcome = outcome
        flight.code = code
        flight.ended = self.loop.time()
        if flight.timer is not None:
            flight.timer.cancel()
        self.flying -= 1
        if self.load.staying:
            self._next(flight.offer.group)
        elif self.load.clients:
            self._next()
        if self.cut and not self.flying and not self.over.done():
            self.over.set_result(None)

    def leaves_at(self, flight: Flight) -> float | None:
        patience_s = self.load.patience_s.get(flight.offer.group)
        return None if self.load.closed or patience_s is None else flight.due + patience_s

    def free(self, client: Client) -> None:
        self.idle.append(client)

    def _open_window(self) -> None:
        self.on_edge("begin")
        self.cpu_s = own_cpu_s()

    def _close_window(self) -> None:
        self.cpu_s = own_cpu_s() - self.cpu_s
        self.on_edge("end")

    def _cut(self) -> None:
        self.cut = True
        for flight, _ in list(self.away.values()):
            self.end(flight, Ended.REFUSED, STILL_REFUSED)
        self.away.clear()
        if self.load.leave_at_end:
            self._hang_up([flight for flight in self.flights if not flight.first], Ended.ABANDONED, "")
        if not self.flying and not self.over.done():
            self.over.set_result(None)

    def _give_up(self) -> None:
        self._hang_up(self.flights, Ended.FAILED, HUNG)

    def _hang_up(self, flights: list[Flight], outcome: Ended, code: str) -> None:
        for flight in flights:
            if flight.client is not None:
                flight.client.leave(flight, outcome, code)
            self.end(flight, outcome, code)


async def play(load: Load, queue: Iterator[tuple[Offer, bytes]], on_edge: Callable[[str], None]) -> Run:
    """Send the requests of a load in the running loop, to the end of the last of them."""
    loop = asyncio.get_running_loop()
    run = Run(load, queue, loop, loop.create_future(), on_edge)
    run.start()
    await run.over
    for client in run.idle:
        client.transport.close()
    return run


async def drive(spec: Spec) -> dict[str, Any]:
    """Run one spec to its end in the running loop."""
    draw = random.Random(spec.seed + spec.texts)
    where = f"{spec.host}:{spec.port}"
    made = (  # a closed loop makes its requests as it goes, an open one before it begins
        (o, request_bytes(o, spec.label(o), f"{spec.name}-{o.number}", where, spec.model, text(o, draw)))
        for o in spec.offered()
    )
    load = spec.load()
    run = await play(load, made if load.closed else iter(list(made)), write_line)
    failed = [flight.code for flight in run.flights if flight.outcome is Ended.FAILED]
    return {
        "window_s": spec.window_s,
        "rows": [flight.row(run.began) for flight in run.flights],
        "cpu_s": run.cpu_s,
        "refusals": run.refusals,
        "failed": len(failed),
        "failed_samples": failed[:MAX_SAMPLES],
        "errors": 0,  # what failed is a figure of this benchmark, and no end of it
        "error_samples": [],
    }


def main() -> int:
    """0: there is a result."""
    spec = Spec(**json.loads(sys.stdin.read()))
    missing = set(GROUPS) - set(spec.labels)
    if missing:
        raise ValueError(f"no labels for {sorted(missing)}")
    gc.disable()  # a collection would show as a wait; a run allocates some tens of megabytes
    write_json(uvloop.run(drive(spec)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
