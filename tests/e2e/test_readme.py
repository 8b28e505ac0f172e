"""Every example of the README and of `docs/` does what it says, word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.settings import load
from tests.e2e.joined import cluster_of
from tests.e2e.stack import Stack
from tests.test_docs import DOCUMENTS, text_of

EXAMPLE_S = 60  # bound of one example; each takes a second or two on an idle machine


def blocks(language: str) -> dict[str, str]:
    """The fenced blocks of a language in all documents, by document and number."""
    return {
        f"{document}-{number}": block
        for document in DOCUMENTS
        for number, block in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL), start=1
        )
    }


def examples(found: dict[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "example", [pytest.param(text, id=name, marks=marks(name, text)) for name, text in found.items()]
    )


def marks(name: str, text: str) -> list[pytest.MarkDecorator]:
    """Each program that joins the cluster takes ten seconds of CPU: of those the README's are in `make test`."""
    return [pytest.mark.long] if "connect(" in text and not name.startswith("README") else []


SHELL = {name: block for name, block in blocks("bash").items() if "curl" in block}
PYTHON = blocks("python")
YAML = blocks("yaml")


def environment(stack: Stack) -> dict[str, str]:
    """What the README's first block exports, with this stack's values, and what leads into its cluster."""
    exported = {"OPENAI_BASE_URL": f"{stack.base_url}/v1", "OPENAI_API_KEY": stack.api_key}
    inside = {} if stack.cluster is None else stack.cluster.environment() | {"SERVE_APP_API_KEY": stack.api_key}
    return os.environ | exported | inside


def test_the_documents_have_the_examples_they_should() -> None:
    assert [name for name in SHELL if name.startswith("README")]
    assert len([name for name in PYTHON if name.startswith("README")]) >= 3
    assert sum("connect(" in example for example in PYTHON.values()) >= 6
    (exports,) = [block for block in blocks("bash").values() if block.startswith("export")]
    assert set(re.findall(r"export (\w+)=", exports)) == {"OPENAI_BASE_URL", "OPENAI_API_KEY"}


@examples(SHELL)
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


@examples(PYTHON)
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


@examples(YAML)
def test_the_configurations_are_valid(tmp_path: Path, example: str) -> None:
    """Each is a whole configuration, or completes one."""
    file = tmp_path / "config.yaml"
    file.write_text(example)
    assert load(file).models


def test_a_deployment_of_an_example_waits_for_no_cpu_of_its_own() -> None:
    """Where engines and routers have all CPUs, one that wants its own waits for ever, and Serve says nothing of it."""
    decorated = [line for text in PYTHON.values() for line in text.splitlines() if line.startswith("@serve.deployment")]
    assert decorated
    assert {line for line in decorated if '"num_cpus": 0' not in line} == set()
