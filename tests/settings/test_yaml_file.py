"""A file's mapping, the lines of its values, and what YAML's own reader would let pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.errors import ConfigError
from serve_app.settings import load
from serve_app.settings.yaml_file import YamlFile, read_yaml


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "my.yaml"


def read(file: Path, text: str) -> YamlFile:
    file.write_text(text)
    return read_yaml(file)


@pytest.mark.parametrize(
    ("text", "place", "why"),
    [
        ("models: []\nmodels: []", ("models",), "stands twice in one mapping, in line 1 and in line 2"),
        ("models:\n- name: a\n  path: x\n  name: b", ("models", 0, "name"), "in line 2 and in line 4"),
        ("a: {b: 1, c: 2, b: 3}", ("a", "b"), "in line 1 and in line 1"),
    ],
)
def test_a_key_that_stands_twice_is_an_error(file: Path, text: str, place: tuple[str | int, ...], why: str) -> None:
    ((found, reported),) = read(file, text).doubles
    assert found == place
    assert why in reported
    with pytest.raises(ConfigError, match="stands twice"):
        load(file)


def test_what_an_alias_brings_stands_there_once(file: Path) -> None:
    text = "base: &base {a: 1, b: 2}\none: {<<: *base, b: 3}\ntwo: {<<: *base}\nlist: [*base, *base]\n"
    found = read(file, text)
    assert found.doubles == ()
    assert found.data["one"] == {"a": 1, "b": 3}
    assert (found.line_of(("one", "b")), found.line_of(("one", "a"))) == (2, 1)
    assert found.written(("one", "b")) == "3"


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet\n", "---\n", "null", "~"])
def test_an_empty_file_is_an_error_and_says_what_stands_for_all_defaults(file: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"the file is empty; \{\} stands for all defaults"):
        read(file, text)
    assert read(file, "{}").data == {}


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]",
        "a: &a {b: *a}",
        "a: 2027-13-45",
        "a: !!python/object:os.system x",
        "a: 1\n---\nb: 2",
        "? [1]\n: 2\n? {}",
    ],
)
def test_what_yaml_cannot_stand_for_is_reported_and_ends_in_no_traceback(file: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="not YAML"):
        read(file, text)


def test_a_place_that_is_not_in_the_file_has_a_line_number_of_the_mapping_that_lacks_it(file: Path) -> None:
    found = read(file, "models:\n  - path: x\n    replicas:\n      max_replicas: 2\n")
    assert found.line_of(("models", 0, "name")) == 2
    assert found.line_of(("models", 0, "replicas", "min_replicas")) == 4
    assert found.written(("models", 0, "name")) is None
    assert found.written(("models",)) is None
