"""Run real clients against a stack of the tests, and print the list of docs/reference/clients.md and its notes.

    python -m tests.clients.run PYTHON NODE_FOLDER    # the interpreter that has the clients; a folder with node_modules

With SERVE_APP_E2E_URL, SERVE_APP_E2E_KEY and SERVE_APP_E2E_BATCH_KEY the stack that runs there is used; it has to have
the models of `CONFIG` and its key with limits. Ends with 1 if a check failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.clients import bench
from tests.clients.checks.common import BUSY, COLUMNS, EMBED, MANY_TOKENS, SLOW
from tests.e2e import stack
from tests.e2e.observe import FILL_S, Observer
from tests.waiting import patient, wait_until

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ROOT / "tests/clients/checks"
CLIENT_S = 600.0  # of all checks of one language: tiny answers, seconds each on two busy cores, and the waits of 429
OVERLOAD = "429"  # the check that needs `BUSY` to be full
LIMITED_KEY = "sk-clients-limited-0123456789"
Found = dict[str, str | None]


def simulated(name: str, step_s: float, slots: int) -> dict[str, object]:
    rates = {"decode_step_s": step_s, "kv_cache_tokens": 131_072}
    return {"name": name, "engine": "simulated", "max_num_seqs": slots, "max_model_len": 10_000, "simulated": rates}


CONFIG: dict[str, object] = {
    "models": [
        stack.CONFIG["models"][0],
        {"name": EMBED, "task": "embed", "dtype": "float32", "max_model_len": 2048, "kv_cache_gb": 0.25},
        simulated(SLOW, 0.01, 8),
        simulated(BUSY, 1.0, 1),
    ],
    "admission": {"classes": {"low": {"max_queued": 0}}},
    "auth": {
        "keys": [
            *stack.CONFIG["auth"]["keys"],
            {"key": LIMITED_KEY, "tenant": "limited", "limits": {"requests_per_minute": 60, "burst_requests": 2}},
        ]
    },
}


@contextlib.contextmanager
def occupied(target: stack.Stack) -> Iterator[None]:
    """The only slot of `BUSY` is taken in the block, by a request that is not stopped for shorter ones."""
    body = {"model": BUSY, "prompt": "a", "max_tokens": MANY_TOKENS, "stream": True, "echo": True, "logprobs": 1}
    with target.post("/v1/completions", body, stream=True) as answer:
        answer.raise_for_status()
        observer = Observer(target)
        wait_until(lambda: observer.granted(BUSY), FILL_S, f"slots of {BUSY} granted", wanted=1)
        yield


def of_all_languages(python: str, node_folder: str, environment: dict[str, str]) -> list[Found]:
    found = checked([python, "-m", CHECKS.relative_to(ROOT).as_posix().replace("/", ".")], ROOT, environment)
    return found + checked(["node", str(CHECKS / "node.mjs")], Path(node_folder), environment)


def checked(command: list[str], folder: Path, environment: dict[str, str]) -> list[Found]:
    """What a process has found that runs the checks of one language. It writes failures to our stderr."""
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=patient(CLIENT_S), check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def listed(found: Sequence[Found]) -> Iterator[str]:
    """An item for each client: whether all its checks work, which of them have an error or a note below, and which it
    lacks."""
    by_client: dict[str, dict[str, Found]] = {}
    for check in found:
        by_client.setdefault(f"{check['client']} {check['version']}", {})[str(check["check"])] = check
    notes: list[str] = []
    for client, checks in by_client.items():
        parts: dict[str, list[str]] = {"failed": [], "noted": [], "lacking": []}
        for column in COLUMNS:
            result = checks.get(column)
            if result is None:
                parts["lacking"].append(f"`{column}`")
            elif result["error"] is not None:
                parts["failed"].append(f"`{column}`: {result['error']}")
            elif result["note"] is not None:
                notes += [] if result["note"] in notes else [result["note"]]
                parts["noted"].append(f"`{column}` [{notes.index(result['note']) + 1}]")
        yield f"- {client}: {'; '.join(_phrases(**parts))}"
    yield ""
    yield from (f"{number}. {note}" for number, note in enumerate(notes, start=1))


def _phrases(failed: list[str], noted: list[str], lacking: list[str]) -> Iterator[str]:
    yield "fails" if failed else "works"
    yield from (", ".join(names) for names in (failed, noted) if names)
    if lacking:
        yield f"has no {', '.join(lacking)}"


def main(python: str, node_folder: str) -> int:
    with stack.running(CONFIG, "clients") as target:
        environment = os.environ | {"OPENAI_BASE_URL": f"{target.base_url}/v1", "OPENAI_API_KEY": target.api_key}
        environment |= {"CLIENTS_LOW_KEY": str(target.batch_key), "CLIENTS_LIMITED_KEY": LIMITED_KEY}
        environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would be read from the internet
        environment.pop("PYTHONPATH", None)
        # 429 first: once it is known how slow `BUSY` is, its refusals ask for waits longer than clients have patience
        with occupied(target):
            found = of_all_languages(python, node_folder, environment | {"CLIENTS_CHECKS": OVERLOAD})
        others = ";".join(column for column in COLUMNS if column != OVERLOAD)
        found += of_all_languages(python, node_folder, environment | {"CLIENTS_CHECKS": others})
        failed = bench.failure(target)
    print(*listed(found), f"vllm bench serve: {failed or 'works'}", sep="\n")
    return int(failed is not None or any(one["error"] for one in found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
