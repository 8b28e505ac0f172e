"""One stack for all end-to-end tests: our own, or one that runs already.

With SERVE_APP_E2E_URL and SERVE_APP_E2E_KEY in the environment, that stack is used and left as it is;
SERVE_APP_E2E_BATCH_KEY is then the key of a second tenant whose class is low at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import openai
import pytest

from serve_app.names import LOG_FORMAT
from tests.e2e import stack as stacks
from tests.e2e.changing import Place, place
from tests.e2e.observe import Observer
from tests.e2e.reference import Reference
from tests.e2e.stack import SIMULATED, Stack
from tests.e2e.three import three as three_routers
from tests.requires import missing, requires

if TYPE_CHECKING:
    from tests.fakes.openid_provider import OpenIdProvider


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Started with the first test of the package that asks for it, taken down after the package's last."""
    running = stacks.external()
    if running is not None:
        yield running
        return
    requires("vllm")
    requires("linux")
    with stacks.own(tmp_path_factory.mktemp("e2e-state"), environment={LOG_FORMAT: "json"}) as started:
        yield started


@pytest.fixture(scope="package")
def provider() -> Iterator[OpenIdProvider]:
    """The OpenID provider of `three`."""
    requires("openid provider")
    from tests.fakes import openid_provider  # it imports Authlib

    with openid_provider.serving() as running:
        yield running


@pytest.fixture(scope="package")
def three(tmp_path_factory: pytest.TempPathFactory, provider: OpenIdProvider) -> Iterator[Stack]:
    """Another one, with three routers and simulated engines, for as long."""
    requires("linux")
    with three_routers(tmp_path_factory.mktemp("three"), provider.settings()) as started:
        yield started


@pytest.fixture(scope="package")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A cluster with Ray's dashboard, for as long, in which each module first declares its configuration."""
    requires("linux")
    with place(tmp_path_factory.mktemp("changes"), dashboard=True) as started:
        yield started


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    """The official SDK with the normal key, without retries."""
    with stack.client() as opened:
        yield opened


@pytest.fixture
def batch_client(stack: Stack, batch_key: str) -> Iterator[openai.OpenAI]:
    """The official SDK with the key of the tenant `batch`, whose class is low at most."""
    with stack.client(batch_key) as opened:
        yield opened


@pytest.fixture(scope="package")
def batch_key(stack: Stack) -> str:
    if stack.batch_key is None:
        missing("SERVE_APP_E2E_BATCH_KEY is not set: the external stack has no known second tenant")
    assert stack.batch_key is not None
    return stack.batch_key


@pytest.fixture
def simulated(stack: Stack, observer: Observer) -> Iterator[str]:
    """The simulated model's name, idle before the test and after it."""
    if SIMULATED not in stack.models:
        missing(f"the external stack does not serve {SIMULATED}")
    observer.wait_idle(SIMULATED)
    yield SIMULATED
    observer.wait_idle(SIMULATED)


@pytest.fixture(scope="package")
def observer(stack: Stack) -> Observer:
    """The stack's metrics."""
    return Observer(stack)


@pytest.fixture(scope="package")
def reference(stack: Stack) -> Reference:
    """The `transformers` library on the weights the stack serves."""
    return Reference(stack.model_folder)
