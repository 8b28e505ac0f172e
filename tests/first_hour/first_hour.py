"""The steps of the first hour, on one instance."""

from __future__ import annotations

import json
import shutil
import socket
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import openai

from benchmarks.common.arms import free_port
from serve_app.engine import ensure_tiny_model
from tests.first_hour import documents
from tests.first_hour.asking import QUESTION, Endpoint, Streaming, require
from tests.first_hour.documents import WrongConfiguration
from tests.first_hour.newcomer import PYTHON, SERVE_APP, Background, Newcomer
from tests.first_hour.teams import Teams
from tests.first_hour.walk import FIRST_ANSWER, Step, StepFailedError
from tests.waiting import patient

SETUP_S = 1800.0  # downloads several GB where `.venv` is not there yet
COMMAND_S = 60.0  # a command that starts nothing takes 1 to 3 s
ANSWER_S = 120.0
START_S = 600.0  # an engine starts in 20 s on two idle cores
UPGRADE_S = 1500.0  # four such starts beside a load
END_S = 120.0
LONG = 8000  # tokens: a stream that lasts longer than a model's start
TINY = "tiny"
SECOND = "second"
TWO_MODELS = """\
models:
  - {name: tiny, path: tiny, dtype: float32, tool_parser: hermes}
  - {name: second, path: tiny}
"""


class FirstHour:
    """Its own port, and what one step learns for the next ones."""

    def __init__(self, newcomer: Newcomer) -> None:
        self._newcomer = newcomer
        self._port = str(free_port())
        self._up: Background | None = None
        self._endpoint = Endpoint("", "")
        self._curl = ""
        self._answered = ""  # the id of the first answer

    def steps(self) -> Sequence[Step]:
        teams = Teams(self._newcomer)
        return [
            Step("make setup", SETUP_S, self._set_up, vital=True),
            Step("serve-app doctor", COMMAND_S, self._doctor),
            Step("serve-app up", START_S, self._start, vital=True),
            Step(FIRST_ANSWER, ANSWER_S, self._first_answer),
            Step("a stream", ANSWER_S, self._stream),
            Step("the OpenAI SDK", ANSWER_S, self._sdk),
            Step("serve-app chat", ANSWER_S, self._chat),
            Step("serve-app status", COMMAND_S, self._status),
            Step("serve-app explain", COMMAND_S, self._explain),
            Step("a second model, plan", COMMAND_S, self._plan),
            Step("a second model, deployed under a stream", START_S, self._second_model),
            *(
                Step(f"wrong file: {one.code}", COMMAND_S, partial(self._check, one))
                for one in documents.wrong_configurations()
            ),
            Step("three teams, deployed", START_S, lambda: teams.deploy(self._endpoint)),
            Step("three teams, each answered", ANSWER_S, teams.ask),
            Step("three teams, a class above the key's", ANSWER_S, teams.ask_above),
            Step("three teams, receipts", ANSWER_S, teams.read_receipts),
            Step("three teams, metrics", ANSWER_S, teams.read_metrics),
            Step("an upgrade under load", UPGRADE_S, self._upgrade),
            Step("serve-app down", END_S, self._down),
            Step("nothing is left", COMMAND_S, self._nothing_left),
        ]

    def _set_up(self) -> str:
        printed = self._newcomer.run("make", "setup")
        return printed.strip().rpartition("\n")[2] or ".venv was complete"

    def _doctor(self) -> str:
        lines = self._newcomer.serve_app("doctor", "--port", self._port).splitlines()
        checks = [line.split("\t")[1:3] for line in lines]
        states = Counter(state for state, _ in checks)
        warned = [name for state, name in checks if state == "warn"]
        return f"{states['ok']} ok" + (f", warns of: {', '.join(warned)}" if warned else "")

    def _start(self) -> str:
        self._up = self._newcomer.start(SERVE_APP, "up", "--port", self._port)
        url = self._up.await_line(r"^Serving tiny at (\S+)$", self._newcomer.left_s).group(1)
        file = self._up.await_line(r"^API key +in (\S+)", self._newcomer.left_s).group(1)
        self._curl = self._up.await_line(r"^Try +(curl .+)$", self._newcomer.left_s).group(1)
        self._up.await_line(r"^Ctrl-C ends everything\.$", self._newcomer.left_s)
        self._endpoint = Endpoint(url, Path(file).read_text().strip())
        return f"ready at {url}"

    def _first_answer(self) -> str:
        answer = json.loads(self._newcomer.run("bash", "-c", self._curl))
        if not answer["choices"][0]["message"]["content"]:
            raise StepFailedError(f"no text: {answer}")
        self._answered = answer["id"]
        return f"{answer['usage']['completion_tokens']} tokens, by the curl line that `up` prints"

    def _stream(self) -> str:
        stream = self._endpoint.stream(TINY, 64)
        return f"{stream.tokens} tokens, the first after {stream.first_s:.2f} s"

    def _sdk(self) -> str:
        client = openai.OpenAI(
            base_url=f"{self._endpoint.url}/v1", api_key=self._endpoint.key, timeout=patient(self._newcomer.left_s)
        )
        models = [model.id for model in client.models.list()]
        whole = client.chat.completions.create(model=TINY, messages=QUESTION, max_tokens=16)
        pieces = [
            piece.choices[0].delta.content or ""
            for piece in client.chat.completions.create(model=TINY, messages=QUESTION, max_tokens=16, stream=True)
        ]
        if models != [TINY] or not whole.choices[0].message.content or not "".join(pieces):
            raise StepFailedError(f"models {models}, answer {whole}, pieces {pieces}")
        return "models, an answer, a stream"

    def _chat(self) -> str:
        reported = self._newcomer.serve_app("chat", "Hello!", "--max-tokens", "64")
        if not reported.strip():
            raise StepFailedError("no text")
        return f"{len(reported.split())} words"

    def _status(self) -> str:
        records = [line.split("\t") for line in self._newcomer.serve_app("status").splitlines()]
        (model,) = [one[1:] for one in records if one[0] == "model"]
        if model[0] != TINY or model[3] != "1/1":
            raise StepFailedError(f"{records}")
        return f"{model[0]} {model[2]}, {model[3]} replicas"

    def _explain(self) -> str:
        reported = self._newcomer.serve_app("explain", self._answered).splitlines()
        if "request of default to tiny, answered" not in reported[0]:
            raise StepFailedError("\n".join(reported))
        return reported[0].partition(": ")[2]

    def _plan(self) -> str:
        config = self._newcomer.file("two.yaml", TWO_MODELS)
        plan = self._newcomer.serve_app("deploy", "--config", config, "--plan")
        if "\n= engine-tiny " not in plan or "\n+ engine-second:" not in plan:
            raise StepFailedError(plan)
        return "tiny goes on, second is added"

    def _second_model(self) -> str:
        with Streaming(self._endpoint, TINY, LONG) as streaming:
            self._newcomer.serve_app("deploy", "--config", str(self._newcomer.home / "two.yaml"))
        require(self._endpoint.chat(SECOND), 200)
        require(self._endpoint.chat(TINY), 200)
        count = len(streaming.streams)
        gap_s = max(one.gap_s for one in streaming.streams)
        streams = f"{count} stream{'' if count == 1 else 's'} of {LONG} tokens"
        return f"both answer; {streams} of the first, none cut, longest gap {gap_s:.2f} s"

    def _check(self, wrong: WrongConfiguration) -> str:
        """The check says what docs/reference/errors.md says. It may say more: what a small machine lacks for it."""
        model = self._newcomer.home / documents.MODEL
        if not model.exists():
            shutil.copytree(ensure_tiny_model(), model)
        self._newcomer.file(documents.FILE, wrong.text)
        reported = self._newcomer.serve_app("check", documents.FILE, status=2, folder=self._newcomer.home)
        if not wrong.is_reported_in(reported):
            raise StepFailedError(f"{wrong.text}\nwanted: {wrong.problem}\nfound:\n{reported}")
        return reported.splitlines()[0].removeprefix("error: ")

    def _upgrade(self) -> str:
        printed = self._newcomer.run(PYTHON, "-m", "benchmarks.upgrade", "--quick")
        result: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
        if result["failed"] or not result["requests"] or not result["replaced_as_expected"]:
            raise StepFailedError(printed)
        return f"{result['requests']} requests, 0 failed, longest gap {result['longest_gap_s']:.2f} s"

    def _down(self) -> str:
        assert self._up is not None
        self._newcomer.serve_app("down")
        status = self._up.await_end(self._newcomer.left_s)
        if status:
            raise StepFailedError(f"`serve-app up` has ended with exit status {status}")
        return "`up` has ended with exit status 0"

    def _nothing_left(self) -> str:
        left = [f"{process.pid} {' '.join(process.cmdline())[:100]}" for process in self._newcomer.processes()]
        left += [str(folder) for folder in self._newcomer.home.glob("sa-*")]
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(self._port))) == 0:
                left.append(f"something listens on port {self._port}")
        if left:
            raise StepFailedError("\n".join(left))
        self._newcomer.serve_app("status", status=3)
        return "no process, no port, no folder of Ray"
