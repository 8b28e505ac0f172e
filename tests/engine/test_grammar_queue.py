"""The queue of grammars to compile, with a compiler that does what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from serve_app.core.grammar_bounds import MAX_GRAMMAR_BYTES
from serve_app.engine.grammar_queue import KEPT_BYTES, KEPT_CPU_S, Grammar, GrammarQueue, GrammarVerdict
from serve_app.errors import BadRequest, Unavailable

FAST = GrammarVerdict(cpu_s=0.01)


class FakeCompiler:
    """Compiles one at a time, each when `finish` is called; notes the order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._done: asyncio.Queue[GrammarVerdict | Exception] = asyncio.Queue()
        self.busy = False

    async def compile(self, grammar: Grammar) -> GrammarVerdict:
        assert not self.busy
        self.busy = True
        self.begun.append(grammar.text)
        outcome = await self._done.get()
        self.busy = False
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def finish(self, outcome: GrammarVerdict | Exception = FAST) -> None:
        self._done.put_nowait(outcome)
        await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def asks(grammars: GrammarQueue, tenant: str, *texts: str) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(grammars.check(tenant, Grammar("ebnf", text))) for text in texts]


def run(test: Callable[[FakeCompiler, GrammarQueue], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        compiler = FakeCompiler()
        await test(compiler, GrammarQueue(compiler.compile))

    asyncio.run(main())


def test_tenants_take_turns_and_each_one_s_grammars_keep_their_order() -> None:
    async def main(compiler: FakeCompiler, grammars: GrammarQueue) -> None:
        attacker = asks(grammars, "attacker", "a1", "a2", "a3", "a4")
        await settled()
        other = asks(grammars, "other", "o1", "o2")
        await settled()
        for _ in range(6):
            await compiler.finish()
        await asyncio.gather(*attacker, *other)
        assert compiler.begun == ["a1", "a2", "o1", "a3", "o2", "a4"]

    run(main)


def test_a_queued_one_is_cancelled_with_its_request() -> None:
    async def main(compiler: FakeCompiler, grammars: GrammarQueue) -> None:
        first, second, third = asks(grammars, "t", "1", "2", "3")
        await settled()
        second.cancel()
        await compiler.finish()
        await compiler.finish()
        await asyncio.gather(first, third)
        assert compiler.begun == ["1", "3"]

    run(main)


def test_one_whose_request_went_while_it_compiled_holds_up_the_next_no_longer_than_that() -> None:
    async def main(compiler: FakeCompiler, grammars: GrammarQueue) -> None:
        first, second = asks(grammars, "t", "1", "2")
        await settled()
        first.cancel()
        await settled()
        assert compiler.begun == ["1"]  # it cannot be interrupted, and nothing runs beside it
        await compiler.finish()
        await compiler.finish()
        await second
        await grammars.check("t", Grammar("ebnf", "1"))  # what it came to is known

    run(main)


def test_a_grammar_is_compiled_once_for_everybody() -> None:
    async def main(compiler: FakeCompiler, grammars: GrammarQueue) -> None:
        both = asks(grammars, "t", "g") + asks(grammars, "u", "g")
        await settled()
        await compiler.finish()
        await asyncio.gather(*both)
        await grammars.check("v", Grammar("ebnf", "g"))
        assert compiler.begun == ["g"]
        other_kind = asyncio.create_task(grammars.check("v", Grammar("regex", "g")))
        await settled()
        await compiler.finish()
        await other_kind
        assert compiler.begun == ["g", "g"]

    run(main)


@pytest.mark.parametrize("weight", [GrammarVerdict(cpu_s=KEPT_CPU_S / 4), GrammarVerdict(size_bytes=KEPT_BYTES // 4)])
def test_known_grammars_cost_the_engine_a_bounded_time_and_memory_in_all(weight: GrammarVerdict) -> None:
    async def main(compiler: FakeCompiler, grammars: GrammarQueue) -> None:
        for text in "12345":
            (ask,) = asks(grammars, "t", text)
            await settled()
            await compiler.finish(weight)
            await ask
        await grammars.check("t", Grammar("ebnf", "2"))
        (again,) = asks(grammars, "t", "1")
        await settled()
        assert compiler.begun == ["1", "2", "3", "4", "5", "1"]
        again.cancel()

    run(main)


def test_what_takes_too_long_is_refused_by_name_and_not_compiled_again() -> None:
    async def main(compiler: FakeCompiler, grammars: GrammarQueue) -> None:
        (ask,) = asks(grammars, "t", "g")
        await settled()
        await compiler.finish(GrammarVerdict(refusal="it takes more than 1 s of CPU", complex=True))
        for attempt in (ask, *asks(grammars, "t", "g")):
            with pytest.raises(BadRequest, match="1 s of CPU") as caught:
                await attempt
            assert caught.value.code == "grammar_too_complex"
        assert compiler.begun == ["g"]

    run(main)


def test_what_is_no_grammar_is_the_client_s_error() -> None:
    async def main(compiler: FakeCompiler, grammars: GrammarQueue) -> None:
        (ask,) = asks(grammars, "t", "g")
        await settled()
        await compiler.finish(GrammarVerdict(refusal="rule x is not defined"))
        with pytest.raises(BadRequest, match="rule x is not defined") as caught:
            await ask
        assert caught.value.code == "invalid_request_error"

    run(main)


def test_a_large_one_is_refused_before_the_queue() -> None:
    async def main(compiler: FakeCompiler, grammars: GrammarQueue) -> None:
        with pytest.raises(BadRequest) as caught:
            await grammars.check("t", Grammar("ebnf", "x" * (MAX_GRAMMAR_BYTES + 1)))
        assert caught.value.code == "grammar_too_complex"
        assert compiler.begun == []

    run(main)


def test_a_compiler_that_went_is_reported_to_who_asked_and_the_next_is_compiled() -> None:
    async def main(compiler: FakeCompiler, grammars: GrammarQueue) -> None:
        first, second = asks(grammars, "t", "1", "2")
        await settled()
        await compiler.finish(Unavailable("gone"))
        await compiler.finish()
        with pytest.raises(Unavailable):
            await first
        await second

    run(main)
