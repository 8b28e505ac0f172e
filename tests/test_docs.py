"""The documents agree with the code: links, paths, names, settings, routes, metrics, the picture of the rooms."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from serve_app.http.api.routes import ROUTES
from serve_app.http.contract import CONSUMED
from serve_app.router.metric_table import Metric
from tests import rooms_picture, settings_table
from tests.house_rules import House
from tests.test_house import SHIPPED, sources

ROOT = Path(__file__).resolve().parent.parent
ARCHIVE = ROOT / "docs/archive"  # dated: of commits that are gone, so nothing there has to exist
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md") if ARCHIVE not in file.parents),
)
MAX_README_LINES = 180
MAX_MODULES_OF_A_REQUEST = 15
MESSAGES = ("shared_queue/messages.py", "shared_queue/delivery.py", "queue/events.py")
# Where a document names a file without its first folders.
BASES = ("", "serve_app/", "serve_app/core/", "docs/")
FOLDERS = (
    "serve_app|autoscaling|benchmarks|tests|scripts|deploy|docs|core|http|router|transport|engine|quota|client|cli"
)
PATH = re.compile(
    rf"`((?:{FOLDERS}|cluster|system|settings|ray_adapter)/[\w./-]+\.(?:py|md|sh|yaml|svg|cfg))(?::([\w.]+))?`"
)


CONTRACT = ROOT / "serve_app/http/contract.py"


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def found(path: str) -> Path | None:
    """The file that a document names."""
    return next((file for base in BASES if (file := ROOT / base / path).is_file()), None)


def defines(file: Path, dotted: str) -> bool:
    """Whether a module has this function, class, constant or method."""
    nodes: list[ast.stmt] = ast.parse(file.read_text()).body
    for name in dotted.split("."):
        there = next((node for node in nodes if _name(node) == name), None)
        if there is None:
            return False
        nodes = there.body if isinstance(there, ast.ClassDef) else []
    return True


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    target = (
        node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    )
    return target.id if isinstance(target, ast.Name) else ""


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([\w-]+))?\)", text_of(document)):
        file = (ROOT / document).parent / target if target else ROOT / document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_and_name_in_backticks_exists(document: str) -> None:
    for path, name in PATH.findall(text_of(document)):
        file = found(path)
        assert file is not None, path
        assert not name or defines(file, name), f"{path}:{name}"


@pytest.mark.parametrize("document", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_method_in_backticks_exists(document: str) -> None:
    files = [ROOT / path for path in sources("serve_app", "autoscaling")]
    for name in set(re.findall(r"`([A-Za-z_]\w*\.[a-z_]\w*)`", text_of(document))):
        owner = name.partition(".")[0]
        if owner[:1].isupper() or owner.startswith("_"):
            assert any(defines(file, name) for file in files), name


def test_the_protocol_in_the_diagram_is_the_codes() -> None:
    (diagram,) = re.findall(r"^```mermaid\n(.*?)^```", text_of("docs/architecture.md"), re.MULTILINE | re.DOTALL)
    messages = set(re.findall(r"\b([A-Z]\w+)\(", diagram))
    core = [ROOT / "serve_app/core" / name for name in MESSAGES]
    assert len(messages) > 10
    assert [name for name in sorted(messages) if not any(defines(file, name) for file in core)] == []
    assert ";" not in diagram, "to mermaid that is the end of a statement"


def test_a_name_that_is_gone_is_seen() -> None:
    file = ROOT / "serve_app/http/api/routes.py"
    assert defines(file, "resolve")
    assert defines(file, "HttpRoute.argument")
    assert not defines(file, "resolved")
    assert PATH.findall("see `http/api/routes.py:resolve`") == [("http/api/routes.py", "resolve")]


def test_the_readme_is_a_face() -> None:
    assert len(text_of("README.md").splitlines()) <= MAX_README_LINES
    for document in DOCUMENTS[1:]:
        assert f"]({document})" in text_of("README.md"), f"the README does not lead to {document}"


def test_the_table_of_settings_is_the_codes() -> None:
    rows = re.findall(r"^\| `([\w.<>\[\]]+)` \| (.*?) \|", text_of("docs/settings.md"), re.MULTILINE)
    assert dict(rows) == settings_table.defaults()
    assert len(rows) == len(dict(rows))


def test_the_table_of_routes_is_the_codes() -> None:
    rows = re.findall(r"^\| `([A-Z]+) (/[\w/]*)` \|", text_of("docs/http.md"), re.MULTILINE)
    assert sorted(rows) == sorted((method, path) for method, path, _ in ROUTES)


def test_the_table_of_metrics_is_the_codes() -> None:
    rows = [row for row in text_of("docs/http.md").splitlines() if row.startswith("| `serve_app_")]
    columns = [(*metric.value,) for metric in Metric]
    assert rows == [f"| `{name}` | {kind} | {', '.join(labels)} | {text} |" for name, kind, labels, text in columns]


def test_a_request_leads_through_few_modules() -> None:
    modules = re.findall(r"^\d+\. `([\w/.]+)`$", text_of("docs/architecture.md"), re.MULTILINE)
    assert 10 <= len(modules) <= MAX_MODULES_OF_A_REQUEST


def test_the_picture_of_the_rooms_is_of_this_code() -> None:
    assert rooms_picture.PICTURE.read_text() == rooms_picture.picture(House(sources(*SHIPPED))), (
        "draw it anew: python -m tests.rooms_picture"
    )


def test_every_field_and_header_of_the_contract_is_documented() -> None:
    """Body fields are in `CONSUMED`; headers are read by their bytes in the same module."""
    table = text_of("docs/http.md").split("## What a client sends")[1].split("\n\n")[1].lower()
    headers = {name.decode() for name in re.findall(rb'b"([a-z-]+-[a-z-]+)"', CONTRACT.read_bytes())}
    assert headers >= {"x-session-id", "x-deadline-ms", "x-queue-status", "idempotency-key"}
    assert not [name for name in CONSUMED | headers if f"`{name}" not in table]
