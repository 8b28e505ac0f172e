"""Draws the example of `docs/explanation/memory.md`: what `core.memory.Ledger` has granted of one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.memory import Device, Hold, LeaseKind, Ledger
from serve_app.core.pools import Holder
from serve_app.core.shared_queue.actor_credit import CREDIT_PARTS
from tests.drawing import framed, text
from tests.pictures.slots import PALE_TEXT, TEXT, WIDTH

NAME = "memory"

GB = 10**9
ROUTERS = 2
KV_TOKENS = 200_000
WEIGHTS_GB = 20  # and all else that `chat` needs beside its KV cache
SESSION_TOKENS = 20_000
REQUEST_TOKENS = {"A": 40_000, "B": 20_000}  # by router
SLOTS = 64
MARGIN = 16
BAR = 40
ROW = 92
GRANTED = ("#bfdbfe", "#1d4ed8")
USED = ("#99f6e4", "#0f766e")
KEPT = ("#e2e8f0", "#64748b")
FREE = ("#ffffff", "#94a3b8")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar. `opens`: the next bar shows what is in it."""

    name: str
    amount: int
    colours: tuple[str, str]
    opens: bool = False


def bars() -> list[tuple[str, list[Part]]]:
    """The bars from the GPU down to a KV cache, with their titles."""
    ledger = Ledger()
    gpu = Device("node", 0, 80 * GB)
    ledger.add_device(gpu)
    for owner, size_gb in (("chat", 50), ("embed", 20)):
        ledger.join(owner, 4.0, 0.0)
        ledger.reserve(owner, LeaseKind.ENGINE, owner, [Hold(gpu.key, size_gb * GB)])
    ledger.commit("chat", KV_TOKENS)
    ledger.open_pool("chat", SLOTS)
    ledger.reserve_alone("session", LeaseKind.SESSION, Hold("chat", SESSION_TOKENS), 60.0, 0.0)
    pool = ledger.pool("chat")
    assert pool is not None
    credit = pool.space.limit // (CREDIT_PARTS * ROUTERS)
    accounts = []
    for router, tokens in REQUEST_TOKENS.items():
        pool.charge(Holder(router), SLOTS // (CREDIT_PARTS * ROUTERS), tokens + credit)
        accounts += [Part(f"{router}: requests", tokens, USED), Part(f"{router}: credit", credit, GRANTED)]
    (device,) = ledger.devices()
    chat = ledger.lease("chat")
    return [
        (
            f"One GPU of 80 GB; {gpu.reserved_bytes / GB:g} GB at the left are for driver, NCCL and CUDA graphs",
            [
                Part("", gpu.reserved_bytes, KEPT),
                Part("engine chat", chat.amount, GRANTED, opens=True),
                Part("engine embed", ledger.lease("embed").amount, GRANTED),
                Part("free", device.free_bytes, FREE),
            ],
        ),
        (
            "Engine chat, 50 GB",
            [
                Part("weights, activations, processes", WEIGHTS_GB * GB, USED),
                Part("KV cache", chat.amount - WEIGHTS_GB * GB, GRANTED, opens=True),
            ],
        ),
        (
            "KV cache of chat, 200,000 tokens: a session, and the accounts of the routers A and B",
            [
                Part("session", SESSION_TOKENS, USED),
                *accounts,
                Part("free", pool.space.free(), FREE),
                Part("for growth", chat.capacity - pool.space.limit, KEPT),
            ],
        ),
    ]


def picture() -> str:
    """The SVG text."""
    found = bars()
    parts: list[str] = []
    width = WIDTH - 2 * MARGIN
    opened: tuple[float, float] | None = None
    for row, (title, pieces) in enumerate(found):
        top = 34 + ROW * row
        if opened is not None:
            above = top - ROW + BAR
            parts.append(
                f'<path d="M{opened[0]:.0f} {above}L{MARGIN} {top}H{MARGIN + width}L{opened[1]:.0f} {above}z" '
                'fill="#f1f5f9"/>'
            )
        parts.append(text(MARGIN, top - 10, title, "start", TEXT, weight="bold", size=13))
        total = sum(piece.amount for piece in pieces)
        x = float(MARGIN)
        for piece in pieces:
            size = width * piece.amount / total
            fill, edge = piece.colours
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{size:.1f}" height="{BAR}" fill="{fill}" stroke="{edge}"/>'
            )
            amount = f"{piece.amount / GB:g} GB" if total >= GB else f"{piece.amount:,}"
            middle = x + size / 2
            if piece.name:
                parts.append(text(middle, top + 17, piece.name, "middle", TEXT, size=11))
                parts.append(text(middle, top + 32, amount, "middle", PALE_TEXT, size=11))
            if piece.opens:
                opened = x, x + size
            x += size
    return framed(34 + ROW * (len(found) - 1) + BAR + 16, parts, WIDTH)
