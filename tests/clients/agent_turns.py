"""Run coding agents, SDKs and LiteLLM for one turn with a tool each, and print the list of docs/reference/clients.md.

    python -m tests.clients.agent_turns NODE_FOLDER PYTHON

NODE_FOLDER has the packages of `agents.json` in its `node_modules`, PYTHON is an interpreter with `litellm[proxy]`. The
agents are set up as docs/tutorials/coding-agents.md says. The simulated engine plays a call of each agent's own tool by
script. An agent works when its output has what its tool has read, and the answer after it, and its requests are of one
session. With SERVE_APP_E2E_URL and SERVE_APP_E2E_KEY the stack that runs there is used; it has to have the model of
`CONFIG`. Ends with 1 if a client failed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.e2e import stack
from tests.waiting import patient, wait_until

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
TUTORIAL = ROOT / "docs/tutorials/coding-agents.md"
TURN_S = 60.0  # of one client: seconds on two idle cores
RECORDED_S = 10.0  # until a router has written the records of requests that have ended
MODEL = "coder"
ANSWER = "The note says hello."
NOTE = "note.txt"
COMMAND = f"cat {NOTE}"
DESCRIBED = {"command": COMMAND, "description": "Read the note"}
SAYS = "I read the note."
SCRIPT: list[dict[str, Any]] = [
    {"reasoning": "The note may say it.", "text": SAYS, "calls": [{"name": "Bash", "arguments": DESCRIBED}]},
    {"text": SAYS, "calls": [{"name": "exec_command", "arguments": {"cmd": COMMAND}}]},
    {"text": SAYS, "calls": [{"name": "bash", "arguments": DESCRIBED}]},
    {"text": SAYS, "calls": [{"name": "read_note", "arguments": {"name": NOTE}}]},
    {"text": ANSWER},
]
CONFIG: dict[str, Any] = {
    "models": [
        {
            "name": MODEL,
            "engine": "simulated",
            "max_num_seqs": 8,
            "max_model_len": 131_072,
            "simulated": {"decode_step_s": 0.005, "kv_cache_tokens": 524_288, "script": SCRIPT},
        }
    ]
}


@dataclass(frozen=True)
class Agent:
    """A coding agent. `block`: the language of its block in the tutorial; `file`: where that goes in a home folder, of
    a shell's block nowhere: its exports are set. `path`: that its requests go to."""

    package: str
    command: str
    block: str
    file: str
    path: str


QUESTION = '"Read the note"'
AGENTS = (
    Agent("@anthropic-ai/claude-code", f'claude -p {QUESTION} --model {MODEL} --allowedTools "Bash(cat:*)" --verbose'
          " --output-format stream-json", "sh", "", "/v1/messages"),
    Agent("@openai/codex", f"codex exec --json {QUESTION}", "toml", ".codex/config.toml", "/v1/responses"),
    Agent("opencode-ai", f"opencode run --format json {QUESTION}", "json", ".config/opencode/opencode.json",
          "/v1/chat/completions"),
)  # fmt: skip


def block_of(language: str) -> str:
    """The tutorial's only block of this language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def versions() -> dict[str, str]:
    """Those that `agents.json` pins."""
    return dict(json.loads((HERE / "agents.json").read_text())["dependencies"])


def environment(home: Path, node_folder: Path) -> dict[str, str]:
    """Of an agent: nothing of ours but the path of programs."""
    return {"PATH": f"{node_folder}/node_modules/.bin:{os.environ['PATH']}", "HOME": str(home)}


def turn_of(agent: Agent, target: stack.Stack, node_folder: Path) -> str | None:
    """What went wrong in one turn of an agent; None: nothing."""
    word = secrets.token_hex(8)
    began = datetime.now(UTC)
    settings = block_of(agent.block).replace("http://127.0.0.1:8000", target.base_url)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        work = Path(folder, "work")
        work.mkdir()
        (work / NOTE).write_text(f"hello {word}\n")
        lines = [f"export SERVE_APP_KEY={target.api_key}"]
        if agent.file:
            file = home / agent.file
            file.parent.mkdir(parents=True)
            file.write_text(settings)
        else:
            lines += [line for line in settings.splitlines() if line.startswith("export ")]
        done = subprocess.run(
            ["bash", "-euc", "\n".join(["git init -q", *lines, agent.command])],
            cwd=work, env=environment(home, node_folder), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=patient(TURN_S), check=False,
        )  # fmt: skip
    if done.returncode != 0 or word not in done.stdout or ANSWER not in done.stdout:
        return f"ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}"
    return _sessions_fault(target, began)


def _sessions_fault(target: stack.Stack, since: datetime) -> str | None:
    """What is wrong with the sessions of the requests since then."""

    def sessions() -> list[Any]:
        answer = target.get("/admin/requests", params={"since": since.isoformat(), "limit": 100})
        answer.raise_for_status()
        return [record.get("session_id") for record in answer.json()["data"] if record["model"] == MODEL]

    wait_until(lambda: len(sessions()) >= 2, RECORDED_S, "records of two requests")
    names = set(sessions())
    return None if len(names) == 1 and None not in names else f"sessions of its requests: {names}"


def turns_of(command: list[str], folder: Path, target: stack.Stack) -> list[dict[str, Any]]:
    """What a script prints of its clients, a line of JSON for each."""
    given = {"ENDPOINT": target.base_url, "API_KEY": target.api_key, "MODEL": MODEL, "ANSWER": ANSWER}
    given["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be read from the internet
    done = subprocess.run(
        command, cwd=folder, env=os.environ | given, capture_output=True, text=True, timeout=patient(2 * TURN_S),
        check=False,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"client"')]
    if not found:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-600:]}")
    return found


def main(node_folder: str, python: str) -> int:
    folder = Path(node_folder).resolve()
    found = list[dict[str, Any]]()
    with stack.running(CONFIG, "agents") as target:
        for agent in AGENTS:
            error = turn_of(agent, target, folder)
            found.append({"client": agent.package, "version": versions()[agent.package], "error": error})
        found += turns_of(["node", str(HERE / "turns.mjs")], folder, target)
        found += turns_of([python, str(HERE / "litellm_turns.py")], ROOT, target)
    for client in found:
        outcome = "works" if client["error"] is None else f"fails: {client['error']}"
        print(f"- `{client['client']}` {client['version']} {outcome}")
    return int(any(client["error"] for client in found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
