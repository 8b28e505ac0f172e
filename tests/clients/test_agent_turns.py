"""The tutorial of coding agents can be followed as written, and the list has the pinned versions."""

from __future__ import annotations

import json
import re
import shlex
import tomllib

from serve_app.settings import parse
from tests.clients import test_table
from tests.clients.agent_turns import AGENTS, ANSWER, CONFIG, MODEL, ROOT, SCRIPT, block_of, versions
from tests.e2e.stack import CONFIG as SHARED

ENDPOINT = "http://127.0.0.1:8000"
KEY_VARIABLE = "SERVE_APP_KEY"


def test_the_list_of_agents_has_the_pinned_versions() -> None:
    section = test_table.DOCUMENT.partition("## Coding agents\n")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"`([@\w/-]+)` (\d[\d.]*\d)", section))
    pinned = test_table.pinned()
    assert listed == versions() | {"litellm": pinned["litellm"]}
    assert f"litellm[proxy]=={pinned['litellm']}" in section
    assert {agent.package for agent in AGENTS} < set(versions())


def test_each_block_of_the_tutorial_names_the_endpoint_the_key_and_the_model() -> None:
    for agent in AGENTS:
        block = block_of(agent.block)
        assert ENDPOINT in block
        assert KEY_VARIABLE in block
        assert re.search(rf"\b{MODEL}\b", block)


def test_the_configurations_parse_as_the_agents_read_them() -> None:
    codex = tomllib.loads(block_of("toml"))
    provider = codex["model_providers"][codex["model_provider"]]
    assert (codex["model"], provider["env_key"], provider["wire_api"]) == (MODEL, KEY_VARIABLE, "responses")
    opencode = json.loads(block_of("json"))
    name, _, model = opencode["model"].partition("/")
    assert model in opencode["provider"][name]["models"]
    exports, more, command = block_of("sh").splitlines()
    assert [word for line in (exports, more) for word in shlex.split(line)].count("export") == 2
    assert shlex.split(command) == ["claude", "--model", MODEL]


def test_the_script_has_a_turn_for_the_tool_of_each_agent_and_ends_with_the_answer() -> None:
    (model,) = parse({**CONFIG, "auth": SHARED["auth"]}).models
    *calling, last = model.simulated.script
    assert (last.text, last.calls) == (ANSWER, ())
    assert [call.name for turn in calling for call in turn.calls] == ["Bash", "exec_command", "bash", "read_note"]
    assert len(SCRIPT) == len(calling) + 1
    assert (ROOT / "tests/clients/turns.mjs").is_file()
