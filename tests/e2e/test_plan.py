"""`serve-app deploy --plan` against a cluster that runs: what it has, and what is deployed there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.commands import app
from tests.e2e.stack import CONFIG, Stack


def test_a_plan_names_what_would_restart_and_changes_nothing(stack: Stack, tmp_path: Path) -> None:
    if stack.cluster is None:
        pytest.skip("an external stack's cluster is not known")
    tiny, simulated = CONFIG["models"]
    file = tmp_path / "my.yaml"
    models = [tiny | {"kv_cache_gb": 500}, simulated | {"max_num_batched_tokens": None, "drain_s": 5}]
    file.write_text(yaml.safe_dump({**CONFIG, "models": models}))

    where = ["--instance", stack.cluster.instance.name, "--state-dir", str(stack.cluster.state.folder.parent)]
    done = CliRunner().invoke(app, ["deploy", "--plan", "--json", "--config", str(file), *where])
    assert done.stdout, done.output
    document: dict[str, Any] = json.loads(done.stdout)

    assert [one["code"] for one in document["findings"]] == ["memory_too_large"]  # by the ledger's own devices
    plan = {one["deployment"]: one for one in document["plan"]}
    assert {name: one["what"] for name, one in plan.items()} == {
        "engine-tiny": "restarted",
        "engine-tiny-sim": "changed",
        "Router": "changed",
        "BatchWorker": "changed",
    }
    assert plan["engine-tiny"]["fields"] == ["kv_cache_gb: not set -> 500.0"]
    assert len(plan["engine-tiny"]["replicas"]) == 1
    assert stack.get("/ready").json() == {"status": "ready", "without_replica": []}
