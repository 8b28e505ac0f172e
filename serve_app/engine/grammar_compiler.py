"""Compiles grammars under a CPU limit: in a separate process, which forks for each grammar.

The parent (`python -m serve_app.engine.grammar_compiler LIMIT_S`) keeps the modules that take seconds to import, so
that killing a fork costs nothing. Its first line of input is xgrammar's description of the tokenizer, each further line
is `[kind, text]`; the answer to each is one line, an object with the fields of `GrammarVerdict`. The process ends with
its input.

Invariant: a fork uses at most LIMIT_S of CPU, `MAX_WALL_S` of time and `MAX_MORE_BYTES` of memory; the kernel enforces
the limits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from serve_app.engine.grammar_queue import MAX_COMPILED_BYTES, Grammar, GrammarVerdict
from serve_app.errors import Unavailable

MAX_WALL_S = 30.0  # reached only with less than a thirtieth of a core; such a machine cannot serve
MAX_MORE_BYTES = 512 * 2**20  # above the parent's mapped memory
OTHERS_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # a fork's own limits end it otherwise
MAX_VALIDATE_S = 0.25  # vLLM's front end validates the grammar again, which blocks its event loop for that long
_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # xgrammar's time and line of source, before what is wrong
ANSWER_S = 120.0  # the first answer comes after its imports, which take 4 s on an idle machine


class Compiler:
    """The compiling process, started now and restarted when it has ended. Calls block; use one thread at a time.

    Args:
        tokenizer: xgrammar's description of the tokenizer.
        limit_s: CPU seconds of a compile.
    """

    def __init__(self, tokenizer: str, limit_s: float) -> None:
        self._tokenizer, self._limit_s = tokenizer, limit_s
        self.process = self._start_process()

    def compile(self, grammar: Grammar) -> GrammarVerdict:
        """Compile a grammar or refuse it. Raises Unavailable: the process does not answer, or has ended twice."""
        answer = self._ask(grammar) or self._ask(grammar)
        if not answer:
            raise Unavailable("the process that compiles grammars has ended and is restarted", retry_after_s=5.0)
        verdict = GrammarVerdict(**json.loads(answer))
        if verdict.size_bytes > MAX_COMPILED_BYTES:
            return GrammarVerdict(refusal=f"compiled, it has more than {MAX_COMPILED_BYTES} bytes", complex=True)
        return verdict

    def _ask(self, grammar: Grammar) -> str:
        """The process's answer; empty: it has ended, for no reason of the grammar's. Raises Unavailable: none came."""
        if self.process.poll() is not None:
            self.end()
            self.process = self._start_process()
        process, is_late = self.process, threading.Event()
        assert process.stdout is not None

        def give_up() -> None:
            is_late.set()
            process.kill()

        late = threading.Timer(ANSWER_S, give_up)
        late.start()
        try:
            self._send_line(process, json.dumps(grammar))
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            late.cancel()
        if not answer:
            self.end()
        if is_late.is_set():
            raise Unavailable("the process that compiles grammars does not answer", retry_after_s=5.0)
        return answer

    def end(self) -> None:
        """End the process. Idempotent."""
        with contextlib.suppress(BrokenPipeError), self.process as process:
            process.kill()

    def _start_process(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._send_line, args=(process, self._tokenizer), daemon=True).start()
        return process

    def _send_line(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()


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
    os.write(1, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def main(limit_s: float) -> None:
    """Answer lines until the input ends."""
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.readline())
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def run(kind: str, text: str) -> int:
        pid = os.fork()
        if not pid:
            _fork(compiler, info.vocab_size, limit_s, kind, text)
        return os.waitpid(pid, 0)[1]

    for line in sys.stdin:
        status = run(*json.loads(line))
        if os.WTERMSIG(status) in OTHERS_SIGNALS:
            status = run(*json.loads(line))
        if os.WTERMSIG(status) in OTHERS_SIGNALS and os.WTERMSIG(status) != signal.SIGKILL:
            break  # that says nothing about the grammar; SIGKILL twice is its memory, on a machine that has too little
        if status:
            why = f"compiling it takes more than {limit_s} s of CPU, or {MAX_MORE_BYTES} bytes of memory"
            os.write(1, json.dumps({"refusal": why, "complex": True}).encode() + b"\n")


if __name__ == "__main__":
    main(float(sys.argv[1]))
