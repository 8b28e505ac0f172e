"""The process that compiles grammars, with xgrammar and a small vocabulary; its imports take seconds."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest
import xgrammar

from serve_app.engine.grammar_compiler import Compiler
from serve_app.engine.grammar_queue import Grammar

LIMIT_S = 0.5
VOCABULARY = [chr(code) for code in range(32, 127)] + ["</s>"]


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler(xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[95]).serialize_json(), LIMIT_S)
    yield compiler
    compiler.end()


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        Grammar("regex", "[ab]+c"),
        Grammar("ebnf", 'root ::= "a" | "b"'),
        Grammar("lark", 'start: "a" | "b"'),
        Grammar("tag", '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}'),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_every_kind_is_compiled(compiler: Compiler, grammar: Grammar) -> None:
    verdict = compiler.compile(grammar)

    assert not verdict.refusal
    assert verdict.cpu_s < LIMIT_S
    assert verdict.size_bytes > 0


def test_what_is_no_grammar_is_reported_with_the_reason(compiler: Compiler) -> None:
    verdict = compiler.compile(Grammar("ebnf", "root ::= missing"))

    assert "missing" in verdict.refusal
    assert not verdict.refusal.startswith("[")  # xgrammar's time of day
    assert not verdict.complex


def test_what_takes_too_long_is_killed_and_the_next_is_served_by_the_same_process(compiler: Compiler) -> None:
    words = ("".join(random.Random(number).choices("abcdefghij", k=12)) for number in range(15_000))
    before = psutil.Process(compiler.process.pid)
    verdict = compiler.compile(Grammar("ebnf", "root ::= " + " | ".join(f'"{word}"' for word in words)))

    assert verdict.complex
    assert "0.5 s of CPU" in verdict.refusal
    assert not compiler.compile(Grammar("ebnf", 'root ::= "a"')).refusal
    assert psutil.Process(compiler.process.pid) == before


@pytest.mark.long  # another start of seconds; the last test has it killed at the worse moment
def test_a_process_that_was_killed_is_replaced(compiler: Compiler) -> None:
    compiler.process.kill()
    compiler.process.wait()

    assert not compiler.compile(Grammar("regex", "a+")).refusal


@pytest.mark.parametrize(("number", "times"), [(signal.SIGTERM, 3), (signal.SIGKILL, 1)])
def test_a_compile_that_others_end_is_no_verdict_on_its_grammar(
    compiler: Compiler, number: signal.Signals, times: int
) -> None:
    slow = Grammar("ebnf", "root ::= " + " | ".join(f'"{number}{"x" * 9}"' for number in range(1500)))
    assert not compiler.compile(slow).refusal
    ended: set[int] = set()

    def end_forks() -> None:
        while len(ended) < times and not done.wait(0.001):
            with contextlib.suppress(psutil.NoSuchProcess):
                for fork in psutil.Process(compiler.process.pid).children():
                    if fork.pid not in ended:
                        ended.add(fork.pid)
                        fork.send_signal(number)

    done = threading.Event()
    ends = threading.Thread(target=end_forks)
    ends.start()
    try:
        verdict = compiler.compile(slow)
    finally:
        done.set()
        ends.join()
    assert ended
    assert not verdict.refusal


def test_a_process_that_is_killed_while_it_compiles_costs_no_request(compiler: Compiler) -> None:
    process = compiler.process
    os.kill(process.pid, signal.SIGSTOP)  # so that it is at it when it dies
    timer = threading.Timer(0.3, process.kill)
    timer.start()
    assert not compiler.compile(Grammar("regex", "a+")).refusal
    timer.join()
    assert compiler.process.pid != process.pid
