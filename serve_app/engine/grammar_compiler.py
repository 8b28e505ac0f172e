"""Compiles grammars under a CPU limit: in a separate process, which forks for each grammar.

The parent (`python -m serve_app.engine.grammar_compiler LIMIT_S`) keeps the modules that take seconds to import, so
that killing a fork costs nothing. It is a `HelperProcess`: its set-up is xgrammar's description of the tokenizer, each
question is `[kind, text]`, each answer an object with the fields of `GrammarVerdict`.

Invariant: a fork uses at most LIMIT_S of CPU, `MAX_WALL_S` of time and `MAX_MORE_BYTES` of memory; the kernel enforces
the limits.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from serve_app.engine.grammar_queue import MAX_COMPILED_BYTES, Grammar, GrammarVerdict
from serve_app.engine.helper_process import HelperProcess, frame, read_message

MAX_WALL_S = 30.0  # reached only with less than a thirtieth of a core; such a machine cannot serve
MAX_MORE_BYTES = 512 * 2**20  # above the parent's mapped memory
OTHERS_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # a fork's own limits end it otherwise
MAX_VALIDATE_S = 0.25  # vLLM's front end validates the grammar again, which blocks its event loop for that long
_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # xgrammar's time and line of source, before what is wrong


class Compiler:
    """The compiling process, started now and restarted when it has ended. Calls block; use one thread at a time.

    Args:
        tokenizer: xgrammar's description of the tokenizer.
        limit_s: CPU seconds of a compile.
    """

    def __init__(self, tokenizer: str, limit_s: float) -> None:
        # a grammar ends only its own fork
        self._helper = HelperProcess("compiles grammars", ["-m", __name__, str(limit_s)], tokenizer.encode(), tries=2)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._helper.process

    def compile(self, grammar: Grammar) -> GrammarVerdict:
        """Compile a grammar or refuse it. Raises Unavailable: the process does not answer, or has ended twice."""
        verdict = GrammarVerdict(**json.loads(self._helper.ask(json.dumps(grammar).encode())))
        if verdict.size_bytes > MAX_COMPILED_BYTES:
            return GrammarVerdict(refusal=f"compiled, it has more than {MAX_COMPILED_BYTES} bytes", complex=True)
        return verdict

    def end(self) -> None:
        """End the process. Idempotent."""
        self._helper.end()


def _fork(compiler: Any, vocabulary: int, limit_s: float, kind: str, text: str) -> None:
    """Compile the grammar, write the answer and end this process."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MAX_MORE_BYTES, mapped + MAX_MORE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    import xgrammar

    begun = time.process_time()
    try:
        validate = {"json": "json_schema", "tag": "structural_tag"}.get(kind, kind)
        getattr(xgrammar.Grammar, f"from_{validate}")(text)
        if time.process_time() - begun > MAX_VALIDATE_S:
            raise MemoryError
        compile = {"json": "json_schema", "ebnf": "grammar", "tag": "structural_tag"}.get(kind, kind)
        compiled = getattr(compiler, f"compile_{compile}")(text)
        mask = xgrammar.allocate_token_bitmask(1, vocabulary)
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask, 0)
        answer = {"cpu_s": time.process_time() - begun, "size_bytes": compiled.memory_size_bytes}
    except MemoryError:
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - any error becomes the refusal, and this process ends
        answer = {"refusal": _LOG_PREFIX.sub("", str(error)).strip()[:500]}
    signal.setitimer(signal.ITIMER_PROF, 0)
    os.write(1, frame(json.dumps(answer).encode()))
    os._exit(0)


def main(limit_s: float) -> None:
    """Answer questions until the input ends."""
    import xgrammar

    questions = sys.stdin.buffer
    tokenizer = read_message(questions)
    if tokenizer is None:
        return
    info = xgrammar.TokenizerInfo.deserialize_json(tokenizer.decode())
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def run(kind: str, text: str) -> int:
        pid = os.fork()
        if not pid:
            _fork(compiler, info.vocab_size, limit_s, kind, text)
        return os.waitpid(pid, 0)[1]

    while (question := read_message(questions)) is not None:
        status = run(*json.loads(question))
        if os.WTERMSIG(status) in OTHERS_SIGNALS:
            status = run(*json.loads(question))
        if os.WTERMSIG(status) in OTHERS_SIGNALS and os.WTERMSIG(status) != signal.SIGKILL:
            break  # that says nothing about the grammar; SIGKILL twice is its memory, on a machine that has too little
        if status:
            why = f"compiling it takes more than {limit_s} s of CPU, or {MAX_MORE_BYTES} bytes of memory"
            os.write(1, frame(json.dumps({"refusal": why, "complex": True}).encode()))


if __name__ == "__main__":
    main(float(sys.argv[1]))
