"""The `conftest.py` of vLLM's tests when they run against our endpoint: their server is ours.

It is copied beside them and runs in their pytest, in a process of its own. `SERVE_APP_REFERENCE` is a JSON object:
`url` of the endpoint, `report`, the file that gets a line of JSON for each test, and `sound`, a recording.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import sys
import types
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from openai.resources.responses import AsyncResponses

GIVEN = json.loads(os.environ["SERVE_APP_REFERENCE"])
MESSAGE_CHARS = 300

HfRunner = object  # a name that their helpers import from here, for tests that do not run

# pytest-asyncio is not installed; anyio's plugin runs coroutines as it does (`anyio_mode=auto`).
sys.modules["pytest_asyncio"] = types.SimpleNamespace(fixture=pytest.fixture)  # type: ignore[assignment]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
async def one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Clients and tasks that a test leaves behind end during another one, which would fail: in a loop that is closed,
    and by anyio's handler with the errors of the tasks. pytest-asyncio logs them."""
    asyncio.get_running_loop().set_exception_handler(None)
    yield  # noqa: PT022  a fixture that returned would not keep the loop


def pytest_configure(config: pytest.Config) -> None:
    import vllm.assets.audio as recordings
    import vllm.model_executor.model_loader.weight_utils as weight_utils
    import vllm.transformers_utils.repo_utils as hub

    from tests import utils

    config.addinivalue_line("markers", "asyncio: of pytest-asyncio")
    # What fixtures fetch from the hub: LoRA adapters, whose tests are exceptions, and models, which are folders here.
    hub.hf_api = lambda: types.SimpleNamespace(snapshot_download=lambda *_, **__: "/no-adapter")
    weight_utils.download_weights_from_hf = lambda model, **_: model
    recordings.AudioAsset.get_local_path = lambda self: Path(GIVEN["sound"])  # it would be fetched from the internet
    utils.RemoteVLLMServer.__init__ = _connect
    utils.RemoteVLLMServer._shutdown = lambda self: None


def _connect(self: Any, model: str, vllm_serve_args: list[str], **options: Any) -> None:
    """In place of a start: the endpoint that runs, which has keys and several models. Requests without a key get one,
    unless the server has keys; calls of the Responses API and of `/tokenizer_info` without a model get the server's."""
    endpoint = urlsplit(GIVEN["url"])
    self.uds = None
    self.host = endpoint.hostname
    self.port = endpoint.port
    keyless = {} if "--api-key" in vllm_serve_args else {"Authorization": f"Bearer {self.DUMMY_API_KEY}"}

    def request(session: requests.Session, method: str, url: str, **options: Any) -> requests.Response:
        headers = keyless | (options.pop("headers", None) or {})
        if urlsplit(url).path == "/tokenizer_info":
            options["params"] = {"model": model}
        return REQUEST(session, method, url, headers=headers, **options)

    requests.Session.request = request  # type: ignore[method-assign]
    for name, method in RESPONSES.items():
        setattr(AsyncResponses, name, functools.partialmethod(_with_model, method, model))


def _with_model(self: Any, method: Callable[..., Any], served: str, *, model: str | None = None, **options: Any) -> Any:
    return method(self, model=model or served, **options)


REQUEST = requests.Session.request
RESPONSES = {name: getattr(AsyncResponses, name) for name in ("create", "parse")}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only tests that ask a server; the others are of vLLM's own code."""
    asking = []
    alone = []
    for item in items:
        assert isinstance(item, pytest.Function)
        by_fixture = any("server" in name or "client" in name for name in item.fixturenames)
        by_itself = "RemoteOpenAIServer" in inspect.getsource(item.function)
        (asking if by_fixture or by_itself else alone).append(item)
    items[:] = asking
    config.hook.pytest_deselected(items=alone)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        _write(item.nodeid, report.outcome, "" if call.excinfo is None else call.excinfo.exconly())
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "failed", str(report.longrepr))


def _write(node: str, outcome: str, message: str) -> None:
    line = {"test": node.removeprefix("tests/entrypoints/"), "outcome": outcome, "message": message[-MESSAGE_CHARS:]}
    with Path(GIVEN["report"]).open("a") as report:
        report.write(json.dumps(line) + "\n")
