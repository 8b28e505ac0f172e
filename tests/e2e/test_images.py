"""Requests with pictures, on vLLM: a model with an image tower answers as the `transformers` library does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import continued_streams, image_requests, stopped_requests, test_preemption, vision
from tests.e2e.assembled import assert_continued
from tests.e2e.images import ASKED, PICTURE_PATH, picture
from tests.e2e.reference import Reference
from tests.e2e.small_models import IMAGE_TEXT, IMAGE_TOKENS, write_vision
from tests.e2e.vision import found
from tests.requires import requires

requires("vllm")
pytestmark = pytest.mark.long  # an engine of its own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision(tmp_path_factory.mktemp("vision") / "model")


def prompt_of(reference: Reference, text: str) -> list[int]:
    return reference.encode_chat([{"role": "user", "content": f"{IMAGE_TEXT}\n{text}"}])


@pytest.mark.parametrize("name", ["chat_image", "messages_image"])
def test_a_chat_with_a_picture_is_the_librarys_greedy_one(name: str, folder: Path) -> None:
    reference = Reference(folder, picture())
    prompt = prompt_of(reference, ASKED)
    run = found()["cut"][name]["undisturbed"]
    compared = reference.compare(prompt, run["made"]["0"])
    assert compared.mismatch is None
    assert compared.tokens == continued_streams.TOKENS
    assert run["usage"][0] == len(prompt)


def test_the_answer_depends_on_the_picture(folder: Path) -> None:
    """Else it would be equal for no reason."""
    made = found()["cut"]["chat_image"]["undisturbed"]["made"]["0"]
    reference = Reference(folder, picture(seed=1))
    assert reference.compare(prompt_of(reference, ASKED), made).mismatch is not None


def test_a_picture_behind_a_link_is_answered_as_one_in_the_body() -> None:
    pictures = found()["pictures"]
    assert pictures["data"]["status"] == 200
    assert pictures["address"] == pictures["data"] | {"counted": pictures["address"]["counted"]}
    assert pictures["fetched"].count(PICTURE_PATH) == 1


def test_the_queue_counts_at_least_the_tokens_of_the_prompt() -> None:
    for name in ("data", "address"):
        asked = found()["pictures"][name]
        assert asked["counted"] >= asked["tokens"] > IMAGE_TOKENS


def test_a_name_that_leads_inside_is_refused_without_saying_where() -> None:
    error = found()["pictures"]["name"]["error"]
    assert found()["pictures"]["name"]["status"] == 400
    assert image_requests.NAME in error["message"]
    assert "media_domains" in error["message"]
    assert "127.0.0" not in error["message"]


def test_a_request_does_not_need_another_one_with_its_picture_to_come_first() -> None:
    assert found()["pictures"]["at_once"] == [200, 200]


def test_two_pictures_are_answered_and_each_has_its_tokens() -> None:
    single, double = (found()["pictures"][name] for name in ("data", "two"))
    assert (single["status"], double["status"]) == (200, 200)
    assert double["tokens"] - single["tokens"] > IMAGE_TOKENS


@pytest.mark.parametrize("name", ["other_address", "redirect", "no_picture", "three"])
def test_what_is_not_allowed_or_no_picture_is_refused(name: str) -> None:
    """`three`: above the model's `limit_mm_per_prompt`."""
    assert found()["pictures"][name]["status"] in (400, 422)


@pytest.mark.parametrize("name", vision.CUT)
def test_a_continued_stream_about_a_picture_is_the_undisturbed_one(name: str) -> None:
    assert_continued(name, found()["cut"][name])


@pytest.mark.parametrize("name", vision.STOPPED)
def test_a_stopped_request_about_a_picture_answers_as_an_undisturbed_one(name: str) -> None:
    undisturbed, once, often = found()["stopped"][name]
    for run in (once, often):
        assert test_preemption.answer_of(name, run["text"]) == test_preemption.answer_of(name, undisturbed["text"])
        assert (run["tokens"], run["losses"], run["stayed"]) == (undisturbed["tokens"], 0, 0)
    assert (undisturbed["moved"], once["moved"]) == (0, 1)
    assert 2 <= often["moved"] <= len(stopped_requests.STOPS[1])  # a busy machine sees some of its tokens late
