"""`vllm bench serve` against a stack, by the command of docs/reference/clients.md."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.e2e.stack import Stack
from tests.waiting import patient

ROOT = Path(__file__).resolve().parents[2]
BENCH_S = 240.0  # eight seconds on two idle cores
SUCCESSES = re.compile(r"Successful requests: +(\d+)")


def documented() -> list[str]:
    """The arguments of the document's command, behind its interpreter."""
    (line,) = re.findall(
        r"^\$ \.venv/bin/python (.* bench serve .*)$", (ROOT / "docs/reference/clients.md").read_text(), re.MULTILINE
    )
    return shlex.split(line)


def failure(target: Stack) -> str | None:
    """What went wrong; None: all requests were answered."""
    stands_for = {"http://127.0.0.1:8000": target.base_url, "MODEL_FOLDER": str(target.model_folder)}
    arguments = [stands_for.get(argument, argument) for argument in documented()]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | {"OPENAI_API_KEY": target.api_key},
        capture_output=True, text=True, timeout=patient(BENCH_S), check=False,
    )  # fmt: skip
    answered = SUCCESSES.search(done.stdout)
    asked = arguments[arguments.index("--num-prompts") + 1]
    worked = done.returncode == 0 and answered is not None and answered[1] == asked
    return None if worked else (done.stderr or done.stdout)[-600:]
