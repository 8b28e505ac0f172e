"""The findings of a file by itself, and that every finding's words are in docs/reference/errors.md."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from serve_app import settings as configuration
from serve_app.cli.check import Finding, check_settings, read
from serve_app.cli.check.findings import WORDS, finding
from serve_app.engine.start.vllm_arguments import Arguments, installed_arguments
from serve_app.settings import Settings, parse

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reference" / "errors.md"
VLLM = Arguments(
    "1.2", {"seed": "int", "dtype": "ModelDType", "swap_gb": "float", "name": "str | None", "eager": "bool"}
)


def found_in(text: str, tmp_path: Path) -> tuple[Settings | None, list[Finding]]:
    file = tmp_path / "my.yaml"
    file.write_text(text)
    found = read(file)
    return found.settings, found.findings


def brief(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(one.code, one.path) for one in findings]


def test_the_list_of_findings_is_the_codes() -> None:
    item = re.compile(r"^- `(\w+)`(?: \((warning)\))?: (.*) -> (.*?)(?:\. Example: `.*`)?$", re.MULTILINE)
    items = [(code, severity or "error", *texts) for code, severity, *texts in item.findall(DOCUMENT.read_text())]
    assert items == [(code, words.severity, words.message, words.remedy) for code, words in WORDS.items()]


def test_every_mistake_is_reported_at_once_with_near_names(tmp_path: Path) -> None:
    settings, findings = found_in(
        "{modles: [], admission: {classes: {high: {ttft_slo: 1}}}, http: {max_sequences: 0, zzz: 1}, "
        "models: [{name: a, kv_cache: 3, replicas: {min_replica: 2}}]}",
        tmp_path,
    )
    assert settings is None
    assert {one.path: one.remedy for one in findings} == {
        "modles": "did you mean models?",
        "admission.classes.high.ttft_slo": "did you mean ttft_slo_s?",
        "http.max_sequences": "what each setting takes: serve-app help SETTING",
        "http.zzz": "all keys: serve-app help settings",
        "models.0.kv_cache": "did you mean kv_cache_gb?",
        "models.0.replicas.min_replica": "did you mean min_replicas?",
    }


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("models: {name: a}", "models", "a list is wanted, - or [...]"),
        ("models: [tiny]", "models.0", "a mapping is wanted, key: value"),
        ("admission: fast", "admission", "a mapping is wanted, key: value"),
    ],
)
def test_another_form_than_the_wanted_one_is_reported_in_yaml_s_words(
    tmp_path: Path, text: str, path: str, message: str
) -> None:
    _, (found,) = found_in(text, tmp_path)
    assert (found.code, found.path, found.message) == ("wrong_value", path, f"line 1: {message}")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("models:\n  - {name: a\n", ", line 3, column 1: not YAML: "),
        ("models:\n\t- a\n", ", line 2, column 1: not YAML: "),
    ],
)
def test_where_a_file_is_no_yaml_is_reported_by_line_and_column(tmp_path: Path, text: str, where: str) -> None:
    _, (found,) = found_in(text, tmp_path)
    assert found.message.startswith(f"{tmp_path / 'my.yaml'}{where}")


def test_a_file_that_is_no_text_is_unreadable(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_bytes(b"models: \xff\xfe")
    (found,) = read(file).findings
    assert found.code == "unreadable"


@pytest.mark.parametrize("text", ["models: [1", "[1]"])
def test_what_is_no_configuration_is_one_finding_that_names_the_file(tmp_path: Path, text: str) -> None:
    _, (found,) = found_in(text, tmp_path)
    assert (found.code, found.severity) == ("unreadable", "error")
    assert str(tmp_path) in found.message


def test_an_old_name_is_a_warning_and_is_read(tmp_path: Path) -> None:
    settings, (found,) = found_in("admission: {trickle_share: 0.1}", tmp_path)
    assert settings is not None
    assert settings.admission.min_share == 0.1
    assert (found.code, found.severity) == ("old_name", "warning")
    assert "admission.min_share" in found.message


def arguments(**extra: Any) -> list[Finding]:
    return check_settings(parse({"models": [{"name": "a", "extra_engine_args": extra}]}), "cpu", VLLM)


def test_an_argument_that_vllm_does_not_have_is_an_error_with_a_near_name() -> None:
    (found,) = arguments(sed=1)
    assert (found.code, found.path) == ("unknown_engine_arg", "models.0.extra_engine_args.sed")
    assert found.remedy == "did you mean seed?"


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("seed", 1, True),
        ("seed", "1", False),
        ("seed", True, False),
        ("swap_gb", 1, True),
        ("name", None, True),
        ("name", 3, False),
        ("eager", True, True),
        ("eager", 1, False),
    ],
)
def test_an_argument_of_a_plain_type_is_held_against_it(name: str, value: Any, fits: bool) -> None:
    assert [one.code for one in arguments(**{name: value})] == ([] if fits else ["wrong_engine_arg"])


def test_an_argument_that_is_a_setting_is_a_warning() -> None:
    (found,) = arguments(dtype="float16")
    assert (found.code, found.severity) == ("engine_arg_is_a_setting", "warning")


def test_a_parser_that_vllm_does_not_have_is_an_error_with_a_near_name() -> None:
    settings = parse({"models": [{"name": "a", "tool_parser": "hermse", "reasoning_parser": "qwen3"}]})
    vllm = dataclasses.replace(VLLM, tool_parsers=frozenset({"hermes"}), reasoning_parsers=frozenset({"qwen3"}))
    (found,) = check_settings(settings, "cpu", vllm)
    assert (found.code, found.path) == ("unknown_parser", "models.0.tool_parser")
    assert found.remedy == "did you mean hermes?"


def test_without_vllm_its_arguments_are_not_checked_and_that_is_reported() -> None:
    settings = parse({"models": [{"name": "a"}, {"name": "b", "engine": "simulated", "tool_parser": "x"}]})
    assert brief(check_settings(settings, "cpu", None)) == [("no_vllm", "models.0")]


def test_ranks_that_cannot_be_placed_are_found() -> None:
    settings = parse({"models": [{"name": "a", "tensor_parallel_size": 2, "gpus_per_rank": 0}]})
    assert brief(check_settings(settings, "gpu", VLLM)) == [("wrong_value", "models.0.gpus_per_rank")]


def test_the_arguments_read_from_vllm_s_source_are_those_of_its_dataclass() -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    read_ = installed_arguments()
    assert read_ is not None
    assert set(read_.types) == {field.name for field in dataclasses.fields(arg_utils.AsyncEngineArgs)}
    assert read_.quantizations == set(
        pytest.importorskip("vllm.model_executor.layers.quantization").QUANTIZATION_METHODS
    )
    assert read_.tool_parsers == set(pytest.importorskip("vllm.tool_parsers").ToolParserManager.list_registered())
    reasoning = pytest.importorskip("vllm.reasoning").ReasoningParserManager
    assert read_.reasoning_parsers == set(reasoning.list_registered())


READY = sorted(Path(configuration.__file__).parent.glob("configs/*.yaml"))


@pytest.mark.parametrize("file", READY, ids=lambda file: file.name)
def test_a_ready_configuration_is_sound(file: Path) -> None:
    found = read(file)
    assert found.settings is not None
    assert found.findings + check_settings(found.settings, "gpu", installed_arguments()) == []


def test_a_finding_has_all_its_values() -> None:
    with pytest.raises(KeyError):
        finding("too_long", "models.0.max_model_len", length=3)
