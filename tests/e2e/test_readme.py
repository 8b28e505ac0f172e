"""The README's examples do what it says, word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app import settings as configuration
from serve_app.settings import Settings
from tests.e2e.joined import cluster_of
from tests.e2e.stack import Stack

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLE_S = 60  # bound of one example; each takes a second or two on an idle machine


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


SHELL = [block for block in blocks("bash") if "curl" in block]
PYTHON = blocks("python")


def environment(stack: Stack) -> dict[str, str]:
    """What the README's first block exports, with this stack's values, and what leads into its cluster."""
    exported = {"OPENAI_BASE_URL": f"{stack.base_url}/v1", "OPENAI_API_KEY": stack.api_key}
    inside = {} if stack.cluster is None else stack.cluster.environment() | {"SERVE_APP_API_KEY": stack.api_key}
    return os.environ | exported | inside


def test_the_readme_has_the_examples_it_should() -> None:
    assert len(SHELL) >= 1
    assert len(PYTHON) >= 5
    assert sum("connect(" in example for example in PYTHON) == 4
    (exports,) = [block for block in blocks("bash") if block.startswith("export")]
    assert set(re.findall(r"export (\w+)=", exports)) == {"OPENAI_BASE_URL", "OPENAI_API_KEY"}


@pytest.mark.parametrize("example", SHELL)
def test_the_curl_example_answers(stack: Stack, example: str) -> None:
    done = subprocess.run(
        ["bash", "-euc", example],
        env=environment(stack),
        capture_output=True,
        text=True,
        timeout=EXAMPLE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"chat.completion"' in done.stdout


@pytest.mark.parametrize("example", PYTHON)
def test_the_python_examples_run(stack: Stack, example: str) -> None:
    if "connect(" in example:
        cluster_of(stack)
    done = subprocess.run(
        [sys.executable, "-c", example],
        env=environment(stack),
        capture_output=True,
        text=True,
        timeout=EXAMPLE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_table_of_settings_names_every_setting_and_no_other() -> None:
    table = README[README.index("## Configuration") : README.index("## What it needs")]
    for section, field in Settings.model_fields.items():
        model = field.annotation if section != "models" else configuration.ModelSettings
        if section == "auth":
            continue
        for name in model.model_fields:  # type: ignore[union-attr]
            assert f"`{name}`" in table or f".{name}`" in table or f"[].{name}`" in table, f"{section}.{name}"


def test_every_file_the_readme_points_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
