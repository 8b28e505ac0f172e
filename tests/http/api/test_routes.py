"""The table of routes: what resolves, and what the refusals say."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import MethodNotAllowed, NotFound
from serve_app.http.api.routes import ROUTES, HttpRoute, LocalCall, resolve
from serve_app.types import Operation

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


@pytest.mark.parametrize(("method", "path", "target"), ROUTES)
@pytest.mark.parametrize("slash", ["", "/"])
def test_every_listed_route_resolves_with_and_without_a_trailing_slash(
    method: str, path: str, target: Operation | LocalCall, slash: str
) -> None:
    assert resolve(method, path + slash) == HttpRoute(target)


def test_every_operation_has_one_route_and_scores_vllm_s_other_places_too() -> None:
    others = {"/score", "/rerank", "/v2/rerank"}
    assert sorted(t for _, path, t in ROUTES if isinstance(t, Operation) and path not in others) == sorted(Operation)
    assert {path: resolve("POST", path).target for path in others} == {
        "/score": Operation.SCORE,
        "/rerank": Operation.RERANK,
        "/v2/rerank": Operation.RERANK,
    }


@pytest.mark.parametrize("path", ["//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions//"])
def test_repeated_slashes_count_as_one(path: str) -> None:
    assert resolve("POST", path) == HttpRoute(Operation.CHAT)


@pytest.mark.parametrize(("method", "path", "target"), [row for row in ROUTES if row[0] == "GET"])
def test_head_goes_where_get_goes(method: str, path: str, target: LocalCall) -> None:
    assert resolve("HEAD", path) == HttpRoute(target)


@pytest.mark.parametrize("model", ["tiny", "Qwen/Qwen3-0.6B", "a/b/c", "models"])
def test_a_model_id_may_hold_slashes(model: str) -> None:
    assert resolve("GET", f"/v1/models/{model}") == HttpRoute(LocalCall.MODEL, argument=model)
    assert resolve("HEAD", f"/v1/models/{model}/") == HttpRoute(LocalCall.MODEL, argument=model)


def test_the_model_list_with_a_slash_is_no_model_without_a_name() -> None:
    assert resolve("GET", "/v1/models/").target is LocalCall.MODELS


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", ("POST",)),
        ("OPTIONS", "/v1/chat/completions/", ("POST",)),
        ("POST", "/v1/models", ("GET", "HEAD")),
        ("DELETE", "/v1/models/a/b", ("GET", "HEAD")),
    ],
)
def test_a_wrong_method_is_answered_with_the_right_ones(method: str, path: str, allow: tuple[str, ...]) -> None:
    with pytest.raises(MethodNotAllowed) as caught:
        resolve(method, path)
    assert caught.value.allow == allow
    assert caught.value.status == 405
    assert pickle.loads(pickle.dumps(caught.value)).allow == allow


@pytest.mark.parametrize("path", ["", "/", "//", "/v1", "/v1/chat", "/V1/models", "/health/x"])
def test_an_unknown_path_is_not_found(path: str) -> None:
    with pytest.raises(NotFound) as caught:
        resolve("POST", path)
    assert caught.value.code == "unknown_url"


def test_a_forgotten_v1_is_pointed_out() -> None:
    with pytest.raises(NotFound, match="did you mean /v1/chat/completions"):
        resolve("POST", "/chat/completions")


def test_a_huge_path_is_not_echoed_whole() -> None:
    for path in ("/" + "x" * 100_000, "/v1/models/" + "x" * 100_000):
        with pytest.raises((NotFound, MethodNotAllowed)) as caught:
            resolve("M" * 100_000, path)
        assert len(caught.value.message) < 400


def kind_of(method: str, path: str) -> type:
    try:
        return type(resolve(method, path))
    except (NotFound, MethodNotAllowed) as error:
        return type(error)


@given(
    st.sampled_from(METHODS) | st.text(max_size=8),
    st.text(max_size=12)
    | st.builds(str.__add__, st.sampled_from([p for _, p, _ in ROUTES]), st.text("/ax", max_size=3)),
)
def test_any_request_line_is_a_route_or_a_refusal_that_holds(method: str, path: str) -> None:
    accepted = [name for name in {*METHODS, method} if kind_of(name, path) is HttpRoute]
    kind = kind_of(method, path)
    assert kind is not NotFound or not accepted
    if kind is MethodNotAllowed:
        with pytest.raises(MethodNotAllowed) as caught:
            resolve(method, path)
        assert sorted(caught.value.allow) == sorted(accepted)


def test_what_no_model_here_can_answer_is_refused_by_its_path_and_says_what_can() -> None:
    with pytest.raises(NotFound, match=r"^/v1/moderations is not served: .* /classify$") as caught:
        resolve("POST", "//v1/moderations/")
    assert (caught.value.code, caught.value.status) == ("unknown_url", 404)
