"""An engine under grant: asks the quota actor before it starts, and says all its life what it has and uses.

The words are spoken by a thread: loading a model holds up the event loop for as long as it takes, and an engine that
falls silent loses its grant.

An engine that hangs while it loads would keep its memory and everybody's turn: it says so and ends.

Invariant: an engine loads only what it was granted, and ends when it is told that its grant is another's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from serve_app.core.memory import EngineReply, EngineReport, Hold
from serve_app.engine.measured_memory import Measured
from serve_app.engine.stall_detector import StallDetector
from serve_app.errors import InsufficientMemory, LeaseConflict, Unavailable

logger = logging.getLogger("ray.serve")

BEAT_S = 1.0  # four of them are lost before an owner counts as dead
ASK_BEAT_S = 0.25  # while it waits: for its memory, or for its turn to load
LAST_WORD_S = 2.0  # for the actor to hear that the memory is free; it finds out by itself, too
LOAD_STALL_S = 600.0  # compiling a big model's graphs takes minutes in which hardly any memory moves
PROGRESS_BYTES = 16 * 2**20  # less is what Python itself moves while nothing is loaded
WAIT_TOLD_S = 10.0  # between log lines of an engine that waits

Speak = Callable[[EngineReport], EngineReply]
"""Sends a word to the quota actor and waits for the answer; raises LeaseConflict, or what Ray does while it is away."""


class Grant:
    """One engine's grant, from the first word to the last.

    Args:
        ask: the first word; who it is, where its ranks are and what it wants.
        speak: called from a thread of its own.
        away: what `speak` raises while the actor is away.
        lost: called from that thread when the grant is another's; the process has to end.
        drain: called from that thread when the engine is to make room; it finishes what it runs and ends.
        measured: looks at this process; None: at what it has in the machine's memory.
        stall_s: how long it may load without any progress; then it is `lost`.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        ask: EngineReport,
        speak: Speak,
        away: tuple[type[BaseException], ...],
        lost: Callable[[str], None],
        drain: Callable[[], None],
        measured: Measured | None = None,
        stall_s: float = LOAD_STALL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._word = ask
        self._measured = measured or Measured(ask.ranks[0].node)
        self._progress, self._clock = StallDetector(stall_s), clock
        self._my_turn = False
        self._speak, self._away, self._lost, self._drain = speak, away, lost, drain
        self._not_taken: tuple[type[BaseException], ...] = (LeaseConflict, *away)
        self._reply = EngineReply(why="the quota actor has not answered yet")
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="grant", daemon=True)

    async def obtain(self, wait_s: float) -> tuple[Hold, ...]:
        """Wait for the memory and for the turn to load; returns what was granted.

        Raises:
            Unavailable: it did not come in time; says what is missing.
        """
        self._thread.start()
        deadline = time.monotonic() + wait_s
        told = time.monotonic()
        try:
            while not (self._reply.holds and self._my_turn):
                if self._ended.is_set():
                    raise Unavailable(f"blocked: {self._reply.why}", code="blocked_memory")
                now = time.monotonic()
                if now >= deadline:
                    raise Unavailable(f"blocked: memory: {self._reply.why}", code="blocked_memory")
                if now - told >= WAIT_TOLD_S:
                    told = now
                    logger.warning("%s waits to load: %s", self._word.owner, self._reply.why)
                await asyncio.sleep(ASK_BEAT_S / 2)
        except BaseException:  # above all: the replica is told to end while it waits
            await asyncio.shield(asyncio.to_thread(self.end))
            raise
        return self._reply.holds

    def runs(self, kv_tokens: int, kv_bytes: int, slots: int) -> None:
        """The engine has started, with this KV pool and so many slots for the line."""
        with self._lock:
            self._word = dataclasses.replace(self._word, kv_tokens=kv_tokens, kv_bytes=kv_bytes, slots=slots)

    def end(self) -> None:
        """The engine's memory is free; say so, and no more."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(LAST_WORD_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                word = self._word
            told, pause_s = self._now(word), BEAT_S if word.kv_tokens else ASK_BEAT_S
            try:
                self._reply = self._speak(told)
                self._my_turn = self._my_turn or self._reply.may_load
            except (LeaseConflict, InsufficientMemory) as error:
                self._reply = EngineReply(why=error.message)
                self._ended.set()
                self._lost(error.message)
                return
            except self._away as error:
                logger.warning("the quota actor does not answer: %s", error)
                pause_s = ASK_BEAT_S  # a new one waits for this word
            except Exception:  # an engine that fell silent for good would lose its grant and go on
                logger.exception("the engine's word to the quota actor failed; it is said again")
            if told.failed:
                self._ended.set()
                self._lost(told.failed)
                return
            if self._reply.drain:
                self._drain()
            self._ended.wait(pause_s)
        try:
            self._speak(dataclasses.replace(self._word, gone=True))
        except self._not_taken as error:
            logger.warning("the quota actor did not hear that the memory is free: %s", error)

    def _now(self, word: EngineReport) -> EngineReport:
        """The word with what is true at this moment."""
        holds = self._reply.holds
        processes, measured = self._measured.look(holds)
        loading = self._my_turn and not word.kv_tokens
        sizes = (self._measured.resident_bytes, *(size or 0 for size in measured))
        marks = (len(processes), *(size // PROGRESS_BYTES for size in sizes))
        stalled_s = self._progress.observe(not loading, marks, self._clock())
        return dataclasses.replace(
            word,
            holds=holds,
            loading=loading,
            failed="" if stalled_s is None else f"loading has made no progress for {stalled_s:.0f} s",
            processes=((self._measured.node, processes),),
            measured_bytes=measured,
        )
