"""Streams on a real Redis server."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from serve_app.batch import stream_intake
from tests.batch.streams import Streams
from tests.fakes.redis_server import RedisServer, redis_server

NewStreams = Callable[..., Streams]
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as found:
        yield found


@pytest.fixture
def new_streams(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> NewStreams:
    """Makes streams with names of their own, with these settings; a close, which waits for a read, is short."""
    monkeypatch.setattr(stream_intake, "READ_BLOCK_MS", 50)
    return lambda **settings: Streams(server, f"test-{next(NUMBERS)}", **settings)


@pytest.fixture
def streams(new_streams: NewStreams) -> Streams:
    return new_streams()
