"""`serve-app simulate` from end to end, on small traces."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import Result

from serve_app.cli.simulate import ArmResult
from serve_app.cli.simulate_command import show
from tests.cli.simulate.pictured import arm, comparison
from tests.cli.test_chat import run  # noqa: F401 - a fixture
from tests.requires import requires

requires("linux")

Run = Callable[..., Result]
MOST = 200
CONFIG: dict[str, Any] = {
    "models": [
        {
            "name": "chat",
            "path": "some/model",
            "max_num_seqs": 8,
            "replicas": {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 1, "upscale_delay_s": 5},
        }
    ],
    "admission": {"classes": {"normal": {"ttft_slo_s": 5}}},
}
PROFILE = {
    "name": "quick",
    "source": "of the tests",
    "slots": 64,
    "kv_tokens": 100_000,
    "step_s": 0.02,
    "sequence_s": 0.0,
    "kv_token_s": 0.0,
    "prefill_tokens_per_s": 20_000,
    "start_s": 10,
    "gpu_hour_price": 2.0,
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with `my.yaml`, `quick.json` and `trace.csv`: 200 requests in 100 s."""
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "quick.json").write_text(json.dumps(PROFILE))
    moments = (f"2023-11-16 18:{15 + number // 120}:{number // 2 % 60:02}.{number % 2 * 5}" for number in range(MOST))
    rows = (f"{moment},{100 + 7 * number % 900},{20 + number % 60}" for number, moment in enumerate(moments))
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return tmp_path


def simulate(run: Run, files: Path, *more: str, profile: str | None = "quick.json", trace: str = "trace.csv") -> Result:  # noqa: F811
    chosen = [] if profile is None else ["--profile", str(files / profile) if profile.endswith(".json") else profile]
    return run("simulate", str(files / "my.yaml"), "--trace", str(files / trace), *chosen, *more)


def test_arms_stand_side_by_side_with_a_recommendation(run: Run, files: Path) -> None:  # noqa: F811
    more = ("--what-if", "max_num_seqs=16,target_ongoing_requests=32", "--what-if", "min_replicas=3", "--json")
    done = simulate(run, files, *more, "--html", str(files / "p.html"))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["trace"]["requests"] == MOST
    assert found["profiles"]["chat"]["source"] == "of the tests"
    names = ["unchanged", "max_num_seqs=16,target_ongoing_requests=32", "min_replicas=3"]
    assert [arm["name"] for arm in found["arms"]] == names
    unchanged, packed, three = found["arms"]
    assert (packed["replicas_peak"], packed["changes"]) == (1, 0)
    assert (unchanged["replicas_peak"], unchanged["changes"] > 0) == (3, True)
    assert three["replicas_mean"] == pytest.approx(3.0, abs=0.05)
    assert packed["gpu_hours"] < unchanged["gpu_hours"] < three["gpu_hours"]
    assert three["cost"] == pytest.approx(2.0 * three["gpu_hours"])
    for each in found["arms"]:
        (normal,) = each["classes"]
        assert (normal["request_class"], normal["level_s"], normal["offered"]) == ("normal", 5.0, MOST)
        per_minute = each["series"]["arrivals_per_minute"]["normal"]
        assert sum(per_minute) * each["series"]["step_s"] / 60 == pytest.approx(MOST)
        assert len(each["series"]["running"]["chat"]) == len(per_minute) == len(each["series"]["ttft_p99_s"]["normal"])
    assert found["recommendation"]["arm"] == names[1]
    assert "max_num_seqs=<wbr>16" in (files / "p.html").read_text().replace("_<wbr>", "_")


def test_the_same_command_gives_the_same_figures(run: Run, files: Path) -> None:  # noqa: F811
    first, second = (simulate(run, files, "--most", "50", "--json").stdout for _ in range(2))
    assert first == second


def test_piped_each_arm_class_and_note_is_a_line(run: Run, files: Path) -> None:  # noqa: F811
    picture = files / "p.png"
    done = simulate(run, files, "--most", "20", "--gpus", "1", "--plot", str(picture), profile="8b-h100")
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["arm", "class", "note", "recommendation"]
    assert lines[0][1:4] == ["ongoing", "1.0/1", "1.0/1"]
    assert lines[1][1:4] == ["ongoing", "normal", "100% in 5 s"]
    assert "estimates" in lines[2][1]


def test_a_terminal_shows_replicas_only_where_these_are_not_the_gpus() -> None:
    small = arm("many changes", 3.0, 1.0, 1.0)
    of_classes = "high in time|high p50|high p99|normal in time|normal p50|normal p99"
    assert heads_of(small) == f"arm|GPUs|GPU hours|cost|refused|changes|{of_classes}"
    large = replace(small, models=tuple(replace(model, gpus_per_replica=2) for model in small.models))
    assert heads_of(large).startswith("arm|replicas|GPUs|")


def heads_of(shown: ArmResult) -> str:
    """The heads of the columns of one arm on a wide terminal."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    show(comparison(shown), console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return re.sub(" {2,}", "|", file.getvalue().splitlines()[0])


def test_the_load_can_be_cut_speeded_up_and_given_a_class(run: Run, files: Path) -> None:  # noqa: F811
    done = simulate(run, files, "--last", "50s", "--most", "60", "--scale", "2", "--class", "high", "--json")
    found = json.loads(done.stdout)
    assert found["trace"]["requests"] == 60
    assert found["trace"]["span_s"] == pytest.approx(59 * 0.5 / 2)
    assert [each["request_class"] for each in found["arms"][0]["classes"]] == ["high"]
    assert found["recommendation"]["arm"] is None
    assert "give --level high=2s" in found["recommendation"]["text"]


def test_a_compressed_trace_of_another_kind_is_read(run: Run, files: Path) -> None:  # noqa: F811
    rows = [
        json.dumps({"timestamp": 1000 * number, "input_length": 900, "output_length": 9, "hash_ids": [1, number]})
        for number in range(5)
    ]
    (files / "m.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    done = simulate(run, files, "--json", "--what-if", "enable_prefix_caching=false", trace="m.jsonl.gz")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["trace"]["prompt_tokens"] == 4500
    cached, computed = [each["classes"][0]["ttft_p50_s"] for each in found["arms"]]
    assert cached < computed, "the prompts share a block"


def test_a_trace_of_models_that_are_not_configured_is_refused_unless_one_is_named(run: Run, files: Path) -> None:  # noqa: F811
    record = {"at": 1.0, "tenant": "a", "request_class": "high", "model": "old", "outcome": "ok"}
    tokens = {"prompt_tokens": 50, "output_tokens": 5}
    (files / "e.jsonl").write_text("\n".join(json.dumps(record | tokens | {"at": at}) for at in (1.0, 2.0)))
    refused = simulate(run, files, trace="e.jsonl")
    assert refused.exit_code == 2
    assert "model: 2 requests of the trace ask for 'old'" in refused.stderr
    done = simulate(run, files, "--model", "chat", "--json", trace="e.jsonl")
    assert json.loads(done.stdout)["arms"][0]["classes"][0]["request_class"] == "high"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "magic"], "--policy magic: it is none of ongoing"),
        (["--what-if", "max_num_seq=4"], "--what-if max_num_seq=4: models.0.max_num_seq: unknown key; did you mean"),
        (["--what-if", "max_num_seqs=8"], "--what-if max_num_seqs=8: it changes nothing that is simulated"),
        (["--level", "urgent=2s"], "--level urgent=2s: give CLASS=SECONDS"),
        (["--class", "urgent"], "--class urgent: it is none of low, normal, high, critical"),
        (["--model", "other"], "--model other: the configuration has chat"),
        (["--last", "soon"], "--last soon: a number with s, m, h or d"),
        (["--gpus", "12", "--gpus-per-node", "8"], "--gpus 12: give a multiple of --gpus-per-node (8)"),
        (["--profile", "b200"], "--profile b200: there is no such profile"),
        (["--profile", "no.json"], "--profile no.json: No such file"),
        (["--trace", "no.csv"], "--trace no.csv: No such file"),
        (["--html", "/no/such/folder/p.html"], "--html /no/such/folder/p.html: No such file"),
        (["--plot", "p.docx"], "--plot p.docx: Format 'docx' is not supported"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(run: Run, files: Path, options: list[str], message: str) -> None:  # noqa: F811
    done = simulate(run, files, "--most", "3", *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1 of the trace is not that of"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "line 2 of the trace: TIMESTAMP: 'now'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "the trace has no request"),
        ("\udcff", "--trace"),
    ],
)
def test_a_wrong_trace_is_one_line_that_names_the_field(run: Run, files: Path, text: str, message: str) -> None:  # noqa: F811
    (files / "wrong.csv").write_bytes(text.encode(errors="surrogateescape"))
    done = simulate(run, files, trace="wrong.csv")
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr


def test_a_model_without_a_profile_is_an_error_that_lists_them(run: Run, files: Path) -> None:  # noqa: F811
    done = simulate(run, files, profile=None)
    assert done.exit_code == 2
    assert "how fast is an engine of chat? Give --profile chat=PROFILE; there are tiny-cpu, 8b-l4" in done.stderr


def test_without_matplotlib_a_picture_is_refused_before_anything_runs(
    run: Run,  # noqa: F811
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    done = simulate(run, files, "--plot", "p.png")
    assert done.exit_code == 2
    assert "install serve-app[plots]; --html draws without it" in done.stderr
