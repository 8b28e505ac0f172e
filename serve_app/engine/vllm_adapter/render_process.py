"""Reads and renders large requests in a process of its own: `python -m serve_app.engine.vllm_adapter.render_process`.

vLLM validates a body in native code that holds the interpreter, and renders its messages in Python, so a thread would
stop the event loop for as long. The process has vLLM's renderer, made from the engine's own configuration, but no
engine. It is a `HelperProcess`: its set-up is a pickled `RenderSetup`, each question a `Submit` in MessagePack, each
answer a pickled one of these: `Rendered`; vLLM's error; ours; the whole answer of work that takes no slot, as JSON.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import sys
from argparse import Namespace
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.datastructures import State
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.render.app_state import init_render_app_state
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from serve_app.engine.helper_process import frame, read_message
from serve_app.engine.vllm_adapter import cut_calls, media_connector, serving
from serve_app.engine.vllm_adapter.render_turns import take_turns
from serve_app.engine.vllm_adapter.rendered import Rendered, name_what_is_refused, without_history
from serve_app.errors import BadRequest
from serve_app.transport import Submit
from serve_app.types import Operation

NICENESS = 5  # behind the engine and its event loop, whose requests are smaller
MAX_MORE_BYTES = 4 * 2**30  # above what it has mapped at its start; a text of 13 MB takes 1.9 GiB of it

_submits = msgspec.msgpack.Decoder(Submit)

Answer = Rendered | ErrorResponse | BadRequest | bytes


@dataclass(frozen=True, slots=True)
class RenderSetup:
    """What the process is made from: vLLM's configuration of the engine, and of its front end. `max_more_bytes`: of
    memory that its requests may take, each by itself."""

    config: VllmConfig
    frontend: Namespace
    tool_strict: bool
    max_more_bytes: int = MAX_MORE_BYTES


class Reader:
    """Reads and renders requests as the engine's serving objects would."""

    def __init__(self, setup: RenderSetup) -> None:
        self._setup = setup
        self._state = State()

    async def start(self) -> None:
        """Make vLLM's renderer."""
        cut_calls.install()  # the grammar of tools is made here, too
        media_connector.install_none()  # requests with links are rendered in the engine's process
        await init_render_app_state(self._setup.config, self._state, self._setup.frontend)
        take_turns(self._state.online_renderer.renderer)  # a text that is truncated is cut first
        name_what_is_refused(self._state.online_renderer.renderer)

    def bound_memory(self) -> None:
        """Bound the memory of this process: an allocation above it fails, or ends the process."""
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = mapped + self._setup.max_more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    async def read(self, submit: Submit) -> Answer:
        """The request, validated and rendered; errors in the words that the engine's process has for them."""
        try:
            if not submit.operation.takes_slot:
                answered = await serving.answer_unqueued(self._state, submit)
                return answered if isinstance(answered, ErrorResponse | bytes) else _json(answered)
            return await self._render(submit)
        except ValidationError as error:
            return serving.validation_error(error, submit)
        except BadRequest as error:
            return error
        except MemoryError:
            why = f"reading this request takes more than {self._setup.max_more_bytes} bytes of memory"
            return create_error_response(why, BadRequest.type, HTTPStatus.BAD_REQUEST)
        except Exception as error:  # noqa: BLE001 - every error is the request's, and its answer
            return serving.error_response(error, submit)

    async def _render(self, submit: Submit) -> Rendered | ErrorResponse:
        renderer = self._state.online_renderer
        request = serving.request_of(submit, self._setup.tool_strict)
        match submit.operation:
            case Operation.CHAT | Operation.MESSAGES:
                rendered = await renderer.render_chat(request)
            case Operation.RESPONSES:
                rendered = await renderer.render_responses(request)
            case _:
                rendered = await renderer.render_completion(request)
        return rendered if isinstance(rendered, ErrorResponse) else without_history(Rendered(request, rendered))


def _json(answered: BaseModel) -> bytes:
    return answered.model_dump_json(by_alias=True).encode()


def main() -> None:
    """Answer questions until the input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM logs to standard output
    os.nice(NICENESS)
    questions = sys.stdin.buffer
    setup = read_message(questions)
    if setup is None:
        return
    reader = Reader(pickle.loads(setup))
    with asyncio.Runner() as runner, open(answers, "wb") as output:
        runner.run(reader.start())
        reader.bound_memory()
        while (question := read_message(questions)) is not None:
            answer = runner.run(reader.read(_submits.decode(question)))
            output.write(frame(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)))
            output.flush()


if __name__ == "__main__":
    main()
