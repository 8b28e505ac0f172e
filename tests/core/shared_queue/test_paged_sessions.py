"""Sessions on a device of 80 GB: what a plain allocator refuses for its holes, KV blocks hold anywhere."""

from __future__ import annotations

import pytest

from serve_app.core.memory import session_name, tokens_in_bytes
from serve_app.errors import InsufficientMemory
from tests.core.shared_queue.test_sessions import ask, opened
from tests.core.shared_queue.world import World

GB = 10**9
DEVICE_GB = 80
SIZES_GB = (20, 20, 20)
LAST_GB = 25
BLOCK_TOKENS = 16
POOL_TOKENS = 610_352 // BLOCK_TOKENS * BLOCK_TOKENS  # 131,072 bytes a token, as of an 8B model with 8 KV heads


class PlainAllocator:
    """First fit: each part of the device is one piece, from an offset on."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.parts: dict[str, tuple[int, int]] = {}

    def allocate(self, name: str, size: int) -> bool:
        start = 0
        for first, end in [*sorted(self.parts.values()), (self._size, self._size)]:
            if first - start >= size:
                self.parts[name] = (start, start + size)
                return True
            start = end
        return False

    @property
    def free(self) -> int:
        return self._size - sum(end - start for start, end in self.parts.values())


def tokens(size_gb: int) -> int:
    return tokens_in_bytes(size_gb * GB, DEVICE_GB * GB, POOL_TOKENS, BLOCK_TOKENS)


def test_three_sessions_of_20_gb_and_then_one_of_25_where_the_middle_one_was() -> None:
    plain = PlainAllocator(DEVICE_GB * GB)
    world = World({"e0": (4, POOL_TOKENS)}, 1)
    world.settle(6)
    for number, size_gb in enumerate(SIZES_GB):
        assert plain.allocate(f"s{number}", size_gb * GB)
        opened(world, f"s{number}", tokens(size_gb))
    # 60 are taken, and of 80 a tenth is kept for requests that grow, so it is too much
    with pytest.raises(InsufficientMemory, match="KV tokens asked"):
        world.quota.on_open_session(ask("last", tokens(LAST_GB)), world.now)
    assert not plain.allocate("last", LAST_GB * GB)

    del plain.parts["s1"]
    world.quota.queue.close_session(session_name("t0", "s1"), world.now)
    world.settle(3)
    assert plain.free == 40 * GB
    assert not plain.allocate("last", LAST_GB * GB)  # two holes of 20
    last = opened(world, "last", tokens(LAST_GB))
    assert last.request.tokens * DEVICE_GB * GB / POOL_TOKENS == pytest.approx(LAST_GB * GB, rel=1e-4)
    assert [one.request.session_id for one in world.quota.sessions.all()] == ["t0 s0", "t0 s2", "t0 last"]
