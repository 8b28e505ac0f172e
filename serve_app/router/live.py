"""What one router knows now, for people who watch, and the same of all routers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping

from serve_app.core.live import RouterPart, Wait, WaitingRow, waiting_rows
from serve_app.core.queue import WaitReason
from serve_app.core.shared_queue import RouterQueue
from serve_app.router.model_router import ModelRouter
from serve_app.router.other_routers import answers_in_time
from serve_app.router.throughput import Throughput

AskParts = Callable[[tuple[str, ...]], Awaitable[Iterable[Awaitable[RouterPart]]]]


def router_part(
    router: str,
    core: RouterQueue,
    models: Mapping[str, ModelRouter],
    throughput: Throughput,
    tenants: Collection[str],
    now: float,
) -> RouterPart:
    """The present state of a router. `tenants`: whose counts and rows are wanted. O(requests here)."""
    slots = {}
    kv_used = {}
    ejected = []
    for model in models.values():
        replicas = model.replica_set
        for replica in sorted(replicas.running):
            slots[replica] = (core.account(replica)[0], replicas.slots[replica])
            kv_used[replica] = _kv_tokens(core, replica)
            if not replicas.is_usable(replica):
                ejected.append(replica)
    return RouterPart(
        router,
        now,
        waiting={name: model.waiting for name, model in models.items()},
        running={name: len(model.replica_set.running) for name, model in models.items()},
        slots=slots,
        ejected=tuple(ejected),
        counts=throughput.counts(core, models, tenants),
        rows=_own_rows(core, models, tenants, now) if core.alone else (),
        kv_used=kv_used,
    )


def _kv_tokens(core: RouterQueue, replica: str) -> int:
    """What requests hold there, of the replica and of the places of sessions."""
    runs = core.in_flight.by_engine.get(replica, {}).values()
    return sum(run.tokens + (0 if run.place is None else run.place.tokens) for run in runs)


def _own_rows(core: RouterQueue, models: Iterable[str], tenants: Collection[str], now: float) -> tuple[WaitingRow, ...]:
    """The waiting requests of a router that the quota actor does not answer."""

    def waits(model: str) -> Iterator[Wait]:
        for request in core.pending.by_request_id.values():
            if request.model == model:
                waited_s = now - request.arrived_s
                arrival = request.arrival
                yield Wait(arrival.request_class.label, arrival.tenant, waited_s, WaitReason.QUOTA_ACTOR.value)

    return tuple(row for model in sorted(models) for row in waiting_rows(model, waits(model), tenants))


async def all_parts(ask_all: AskParts, tenants: tuple[str, ...]) -> dict[str, RouterPart]:
    """The parts of the routers that answer in time, by id. Raises NO_ANSWER: no router could be asked."""
    return {part.router: part for part in await answers_in_time(await ask_all(tenants), "a console")}
