"""An unknown key that is another stack's word: the error names its counterpart, which exists."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from serve_app.errors import ConfigError
from serve_app.settings import parse
from serve_app.settings.field_words import ABSENT, FIELD_WORDS, PAGE
from tests import settings_table

DOCUMENT = Path(__file__).parents[2] / "docs/explanation/not-here.md"
DEFAULTS = settings_table.defaults()
PLACES: tuple[dict[str, Any], ...] = (
    {},
    {"models": [{"name": "m"}]},
    {"models": [{"name": "m", "replicas": {}}]},
    {"auth": {"keys": [{"key": "sk-0123456789abcdef"}]}},
    {"admission": {"tenants": {"acme": {}}}},
)


def innermost(place: Any) -> dict[str, Any]:
    """The last mapping in it."""
    inside = [one for one in place.values() if isinstance(one, dict | list)]
    if not inside:
        return place  # type: ignore[no-any-return]
    return innermost(inside[-1][0] if isinstance(inside[-1], list) else inside[-1])


@pytest.mark.parametrize("word", sorted(FIELD_WORDS | ABSENT))
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_the_error_names_the_key_and_its_counterpart_wherever_it_stands(place: dict[str, Any], word: str) -> None:
    given = copy.deepcopy(place)
    innermost(given)[word] = 7
    with pytest.raises(ConfigError, match=rf"{word}: unknown key; .{{20}}") as refused:
        parse(given)
    reported = f"counterpart: {FIELD_WORDS[word]}" if word in FIELD_WORDS else f"there is none here: {ABSENT[word]}"
    assert reported in str(refused.value)
    assert PAGE in str(refused.value)


@pytest.mark.parametrize("word", sorted(FIELD_WORDS))
def test_it_is_no_setting_unless_it_names_that_one_too_and_all_that_it_names_are_settings(word: str) -> None:
    """`max_size` is a batch's here, and elsewhere also a queue's: the error names both."""
    assert not [path for path in DEFAULTS if path.rpartition(".")[2] == word and path not in FIELD_WORDS[word]]
    section = r"(?:\b(?:models\[\]|admission|quota|traces|routes\[\]|auth\.keys\[\](?!\.limits))|<limits>)"
    named = re.findall(rf"{section}\.[\w.<>\[\]]*\w", FIELD_WORDS[word])
    assert named
    for path in named:
        assert [one for one in DEFAULTS if one == path or one.startswith(f"{path}.")], path


def test_every_refused_word_has_its_row_on_the_page_that_the_error_names() -> None:
    text = DOCUMENT.read_text()
    table = text.partition("\n## Words that a configuration refuses\n")[2]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert text.splitlines()[0] == f"# {PAGE}"
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(FIELD_WORDS | ABSENT)


def test_a_word_has_one_answer_and_a_plain_no_says_what_is_done_instead() -> None:
    assert not FIELD_WORDS.keys() & ABSENT.keys()
    assert not [path for path in DEFAULTS if path.rpartition(".")[2] in ABSENT]
    assert all(len(why.split()) > 6 for why in ABSENT.values())


@pytest.mark.parametrize(
    "word",
    [
        "lora_modules",
        "served_model_name",
        "speculative_config",
        "kv_transfer_config",
        "fallbacks",
        "router_settings",
        "autoscaling",
        "max_wait_ms",
        "wait_time",
        "timeout_ms",
        "priority_classes",
        "ray_actor_options",
        "temperature",
        "threshold",
        "max_size",
    ],
)
def test_a_peer_s_word_is_known(word: str) -> None:
    assert word in FIELD_WORDS | ABSENT


def test_a_fixed_number_and_the_first_number_of_replicas_are_both_named() -> None:
    for name in ("min_replicas", "max_replicas", "initial_replicas"):
        assert name in FIELD_WORDS["num_replicas"]


def test_any_other_unknown_key_is_just_that() -> None:
    with pytest.raises(ConfigError, match=r"^quota\.nothing: unknown key$"):
        parse({"quota": {"nothing": 1}})
