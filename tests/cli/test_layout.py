"""What the commands list, at 80 columns and piped: no line too wide, no name cut, one record a line."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from serve_app.cli import explain, instances, quota
from serve_app.cli.layout import Listing, fill
from serve_app.cli.progress import start_text

WIDTH = 80
MODEL = "meta-llama/Llama-3.3-70B-Instruct-FP8-dynamic-of-a-very-careful-team"
DEPLOYMENT = "engine-" + MODEL.replace("/", "--")
KEY_FILE = "/home/somebody/.local/state/serve-app/an-instance-of-theirs/generated_api_key"
GB = 10**9

Show = Callable[[dict[str, Any], Console], None]


def terminal(show: Show, found: Mapping[str, Any], width: int = WIDTH) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True, color_system=None)
    show(dict(found), console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def piped(show: Show, found: Mapping[str, Any]) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=WIDTH)
    show(dict(found), console)
    return [line.split("\t") for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


START = {"phase": "loading", "elapsed_s": 12.3, "share": 0.43, "done_bytes": None, "last_s": 31.2}


@pytest.mark.parametrize(
    ("more", "text", "in_steps"),
    [
        ({}, "downloading 1.20 GB", "downloading 1.2 GB"),
        ({"total_bytes": None}, "downloading 1.20 GB", "downloading 1.2 GB"),
        ({"total_bytes": 16_060_000_000}, "downloading 1.20 of 16.06 GB", "downloading 1.2 of 16.1 GB"),
    ],
    ids=["by a former release", "not known", "known"],
)
def test_a_download_is_reported_with_its_size_if_that_is_known(more: dict[str, Any], text: str, in_steps: str) -> None:
    start = {"phase": "downloading", "elapsed_s": 9.0, "share": None, "done_bytes": 1_204_000_000, "last_s": None}
    assert start_text(start | more) == f"{text}, 9 s"
    assert start_text(start | more, steps=True) == in_steps


def replica(name: str, state: str = "RUNNING") -> dict[str, Any]:
    return {"id": name, "state": state, "node": "ab" * 28, "address": "192.168.100.101"}


STATUS: dict[str, Any] = {
    "instance": "default",
    "state": "running",
    "url": "http://127.0.0.1:8000",
    "api_key_file": KEY_FILE,
    "dashboard_url": None,
    "message": "",
    "models": [
        {
            "name": MODEL,
            "deployment": DEPLOYMENT,
            "state": "healthy",
            "message": "",
            "replicas": [replica("x7k2m9qp"), replica("a1b2c3d4", "STARTING") | {"start": START}],
            "target": 2,
            "ongoing": 3,
            "waiting": None,
            "why": "9 requests: 2 wanted; held back: memory: at least 48.32 GB needed on one device, 29.68 GB free",
        }
    ],
    "routers": [replica("r0000001")],
    "other_applications": [{"name": "their-app", "state": "running", "route": "/theirs"}],
    "resources": {"CPU": {"used": 3.5, "total": 8.0}, "GPU": {"used": 0.0, "total": 0.0}},
    "holders": [
        {"kind": "ours", "owner": DEPLOYMENT, "CPU": 2.0, "GPU": 0.0},
        {"kind": "other application", "owner": "their-app, Worker", "CPU": 1.5, "GPU": 0.0},
    ],
}
QUOTA: dict[str, Any] = {
    "total_bytes": 160 * GB,
    "reserved_bytes": 4 * GB,
    "granted_bytes": 60 * GB,
    "free_bytes": 96 * GB,
    "fragmentation": 0.5,
    "fragmented": True,
    "recovering": False,
    "draining": [],
    "addresses": {"ab" * 28: "192.168.100.101", "cd" * 28: "10.0.0.1", "ef" * 28: "10.0.0.1"},
    "devices": [
        {
            "device": f"{node * 28}/0",
            "total_bytes": 80 * GB,
            "reserved_bytes": 2 * GB,
            "granted_bytes": 60 * GB,
            "free_bytes": 18 * GB,
            "percent": 76.9,
        }
        for node in ("ab", "cd")
    ],
    "engines": [
        {
            "replica": "x7k2m9qp",
            "model": MODEL,
            "state": "committed",
            "granted_bytes": 60 * GB,
            "measured_bytes": None,
            "kv_tokens": 131072,
            "kv_tokens_routers": 65536,
            "kv_tokens_sessions": 0,
            "kv_tokens_used": 123,
        }
    ],
    "queues": [],
    "waiting": [],
    "kept": [],
    "short": [{"model": MODEL, "why": "memory: at least 48.32 GB needed on one device, 29.68 GB free"}],
    "alarms": [],
    "sessions": [],
}
RECEIPT = {
    "outcome": "ok",
    "story": [
        f"5d0c6f0e9c7b4f0f8a4f5f7d1c2b3a49: normal request of acme to {MODEL}, answered after 1.2 s.",
        "Started at once.",
    ],
}
LISTED: list[tuple[Show, Mapping[str, Any]]] = [
    (instances.show, STATUS),
    (quota.show, QUOTA),
    (explain.show, RECEIPT),
]


@pytest.mark.parametrize(("show", "found"), LISTED, ids=["status", "quota", "explain"])
def test_at_80_columns_no_line_is_wider_and_no_name_is_cut(show: Show, found: Mapping[str, Any]) -> None:
    lines = terminal(show, found)
    assert [line for line in lines if cell_len(line) > WIDTH and len(line.split()) > 1] == []
    assert any(MODEL in line for line in lines)


@pytest.mark.parametrize(("show", "found"), LISTED, ids=["status", "quota", "explain"])
def test_piped_nothing_is_wrapped_and_nothing_is_coloured(show: Show, found: Mapping[str, Any]) -> None:
    lines = piped(show, found)
    assert any(MODEL in cell for line in lines for cell in line)
    assert not any("\x1b" in cell for line in lines for cell in line)


def test_status_names_each_replica_in_a_line_of_its_model_and_who_else_is_there() -> None:
    lines = terminal(instances.show, STATUS)
    first = next(number for number, line in enumerate(lines) if line.startswith(MODEL))
    assert lines[first : first + 2] == [MODEL, "  healthy 1/2  3 ongoing"]
    assert [line.split() for line in lines if "192.168" in line] == [
        ["x7k2m9qp", "RUNNING", "192.168.100.101"],
        ["a1b2c3d4", "STARTING", "192.168.100.101", "loading", "43%,", "12", "s,", "last", "start", "31", "s"],
        ["r0000001", "RUNNING", "192.168.100.101"],
    ]
    assert "  their-app  running  /theirs" in lines
    assert "3.5 of 8 CPUs are held" in lines
    assert not any("GPUs are held" in line for line in lines), "there are none"
    assert KEY_FILE in lines[-1]


def test_piped_status_has_one_record_a_line_with_the_same_columns() -> None:
    lines = piped(instances.show, STATUS)
    assert lines[0] == ["instance", "default", "running", "http://127.0.0.1:8000", KEY_FILE]
    assert lines[1] == ["model", MODEL, DEPLOYMENT, "healthy", "1/2", "3", "-", STATUS["models"][0]["why"]]
    assert lines[2:4] == [
        ["replica", MODEL, "x7k2m9qp", "RUNNING", "192.168.100.101", "-"],
        ["replica", MODEL, "a1b2c3d4", "STARTING", "192.168.100.101", "loading 43%, 12 s, last start 31 s"],
    ]
    assert lines[4] == ["router", "r0000001", "RUNNING", "192.168.100.101", "-"]
    assert ["application", "their-app", "running", "/theirs"] in lines
    assert ["holder", "other application", "their-app, Worker", "1.5", "0"] in lines
    widths: dict[str, set[int]] = {}
    for kind, *cells in lines:
        widths.setdefault(kind, set()).add(len(cells))
    assert all(len(counts) == 1 for counts in widths.values()), widths


def test_a_device_is_named_by_its_nodes_address_where_only_one_node_has_it() -> None:
    names = [line[1] for line in piped(quota.show, QUOTA) if line[0] == "device"]
    assert names == ["192.168.100.101/0", f"{'cd' * 28}/0"]


def test_where_a_row_does_not_fit_each_value_has_its_name() -> None:
    lines = terminal(quota.show, QUOTA)
    (row,) = (number for number, line in enumerate(lines) if line.startswith("x7k2m9qp"))
    assert " ".join(lines[row : row + 4]).split() == [
        *("x7k2m9qp", "model", MODEL, "state", "committed", "granted", "60.00", "GB", "measured", "-"),
        *("KV", "tokens", "131072", "routers", "65536", "sessions", "0", "in", "use", "123"),
    ]


def test_a_row_that_fits_is_aligned_below_its_column() -> None:
    def show(_: dict[str, Any], console: Console) -> None:
        Listing(console).table("thing", ("name", "size"), [("a", "1"), ("a longer name", "200")], indent=1)

    assert terminal(show, {}) == ["  name           size", "  a              1", "  a longer name  200"]
    assert piped(show, {}) == [["thing", "a", "1"], ["thing", "a longer name", "200"]]


def test_a_line_break_in_a_value_does_not_break_its_record() -> None:
    def show(_: dict[str, Any], console: Console) -> None:
        Listing(console).table("thing", ("name", "why"), [("a", "one\n\ttwo")])

    assert piped(show, {}) == [["thing", "a", "one two"]]


def test_only_a_word_wider_than_the_terminal_makes_a_wider_line() -> None:
    assert fill(["aa", "b" * 12, "cc", "dd"], 10, 1) == ["  aa", "    " + "b" * 12, "    cc  dd"]
    assert fill([], 10) == [""]


ROUTES: list[dict[str, Any]] = [
    {
        "name": "chat",
        "targets": [{"model": MODEL, "weight": 9.0}, {"model": "new", "weight": 1.0}],
        "fallbacks": ["spare"],
        "shadow": {"model": "next", "share": 0.05},
    },
    {"name": "alias", "targets": [{"model": "new", "weight": 1.0}], "fallbacks": [], "shadow": None},
]


def test_status_shows_each_name_with_its_models_and_their_parts() -> None:
    lines = terminal(instances.show, STATUS | {"routes": ROUTES})
    text = "\n".join(lines)
    for words in ("name chat", f"{MODEL} 90.0%", "new 10.0%", "fallback spare", "shadow next 5.0%", "name alias"):
        assert words in text
    assert [line for line in lines if cell_len(line) > WIDTH and len(line.split()) > 1] == []
    records = piped(instances.show, STATUS | {"routes": ROUTES})
    assert [line for line in records if line[0] == "name"] == [
        ["name", "chat", f"{MODEL} 90.0%", "new 10.0%", "fallback spare", "shadow next 5.0%"],
        ["name", "alias", "new 100.0%"],
    ]
