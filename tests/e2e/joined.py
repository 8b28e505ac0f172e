"""This process, or one of its own, as a driver of the stack's cluster, for the tests of the Python handle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

from serve_app.client import Client, connect
from serve_app.cluster.local import LocalCluster
from serve_app.cluster.local.state import STATE_VARIABLE
from tests.e2e.stack import SIMULATED, SIMULATED_SLOTS, Stack
from tests.interruptible import interruptible
from tests.requires import ROOT, missing
from tests.waiting import patient

PROGRAM_S = 60  # bound of a program of its own; joining takes three seconds on an idle machine
LONG = 8000  # tokens of the simulated engine: 40 s, so what is gone sooner has not ended by itself


def cluster_of(stack: Stack) -> LocalCluster:
    if stack.cluster is None:
        missing("the external stack's cluster cannot be joined from here")
    assert stack.cluster is not None
    return stack.cluster


@contextmanager
def joined(stack: Stack) -> Iterator[Client]:
    """A client in this process, connected for the block by the instance's name."""
    cluster = cluster_of(stack)
    with mock.patch.dict(os.environ, {STATE_VARIABLE: str(cluster.state.folder.parent)}):
        client = connect(stack.api_key, instance=cluster.instance.name)
    with client:
        yield client


@contextmanager
def full(llm: Client) -> Iterator[None]:
    """All slots of the simulated model taken for the block."""
    with llm.sync.stream_complete("blocker", model=SIMULATED, n=SIMULATED_SLOTS, max_tokens=LONG) as blocker:
        next(blocker)
        yield


def environment(stack: Stack, **more: str) -> dict[str, str]:
    """What a newcomer's program gets: the cluster's environment and the API key."""
    return os.environ | cluster_of(stack).environment() | {"SERVE_APP_API_KEY": stack.api_key} | more


def run(program: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, to its end."""
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=dict(environ), cwd=ROOT, capture_output=True, text=True, timeout=patient(PROGRAM_S), check=False
    )


@contextmanager
def running(program: str, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A program in a process of its own, for the block; killed at its end."""
    process = subprocess.Popen(
        interruptible([sys.executable, "-c", program]),
        env=dict(environ),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=patient(PROGRAM_S))
