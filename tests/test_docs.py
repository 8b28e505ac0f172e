"""The documents agree with the code: links, paths, names, settings, routes, tables, the picture of the rooms."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from serve_app.http.api.routes import ROUTES, BatchCall, FileCall, KeyCall, LocalCall, SessionCall, resolve
from serve_app.http.contract import CONSUMED
from tests import rooms_picture, settings_table
from tests.generated import blocks, errors, pages
from tests.house_rules import House
from tests.pictures.files import PICTURES
from tests.test_house import SHIPPED, sources

ROOT = Path(__file__).resolve().parent.parent
ARCHIVE = ROOT / "docs/archive"  # dated: of commits that are gone, so nothing there has to exist
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md") if ARCHIVE not in file.parents),
)
INDEX = "docs/index.md"
MAX_README_LINES = 140
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
MAX_WORDS = 47_500  # of README and docs without the archive, as `wc -w` counts them: a day's reading


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def found(path: str) -> Path | None:
    """The file that a document names."""
    return next((file for base in BASES if (file := ROOT / base / path).is_file()), None)


def defines(file: Path, dotted: str) -> bool:
    """Whether a module has this function, class, constant or method."""
    nodes: list[ast.stmt] = ast.parse(file.read_text()).body
    for name in dotted.split("."):
        definition = next((node for node in nodes if _name(node) == name), None)
        if definition is None:
            return False
        nodes = definition.body if isinstance(definition, ast.ClassDef) else []
    return True


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    target = (
        node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    )
    return target.id if isinstance(target, ast.Name) else ""


def linked_from(document: str) -> set[str]:
    """The documents that a document links to."""
    folder = (ROOT / document).parent
    targets = re.findall(r"\]\(([^)#:\s]+\.md)(?:#[\w-]+)?\)", text_of(document))
    return {os.path.relpath((folder / target).resolve(), ROOT) for target in targets} & set(DOCUMENTS)


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


@pytest.mark.parametrize("document", ["docs/explanation/architecture.md", "CONTRIBUTING.md"])
def test_every_method_in_backticks_exists(document: str) -> None:
    files = [ROOT / path for path in sources("serve_app", "autoscaling")]
    for name in set(re.findall(r"`([A-Za-z_]\w*\.[a-z_]\w*)`", text_of(document))):
        owner = name.partition(".")[0]
        if owner[:1].isupper() or owner.startswith("_"):
            assert any(defines(file, name) for file in files), name


def test_the_protocol_in_the_diagram_is_the_codes() -> None:
    (diagram,) = re.findall(
        r"^```mermaid\n(.*?)^```", text_of("docs/explanation/architecture.md"), re.MULTILINE | re.DOTALL
    )
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
    assert INDEX in linked_from("README.md")


def test_every_page_is_reached_from_the_start_page() -> None:
    reached = {INDEX}
    ahead = [INDEX]
    while ahead:
        found = linked_from(ahead.pop()) - reached
        reached |= found
        ahead += found
    assert [page for page in DOCUMENTS if page.startswith("docs/") and page not in reached] == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/images").glob("terminal-*.svg")), ids=lambda path: path.name)
def test_a_picture_of_a_terminal_loads_nothing(picture: Path) -> None:
    assert not re.search(r"(?:href|src)=|url\((?!#)", picture.read_text())


def test_the_list_of_settings_is_the_codes() -> None:
    items = re.findall(r"^- `([\w.<>\[\]]+)`(?: \((.*?)\))?: ", text_of("docs/reference/settings.md"), re.MULTILINE)
    assert {name: default or "not set" for name, default in items} == settings_table.defaults()
    assert len(items) == len(dict(items))


def test_the_list_of_routes_is_the_codes() -> None:
    section = text_of("docs/reference/http.md").split("\n## Routes\n\n")[1].split("\n\n")[0]
    routes = re.findall(r"`([A-Z]+) (/[\w/]*)`", section)
    assert sorted(routes) == sorted((method, path) for method, path, _ in ROUTES)


def test_every_route_with_an_id_is_documented() -> None:
    """What may be done with a session, key, file or batch, and how one model and one request are asked for."""
    documented = re.findall(r"`([A-Z]+) (/[\w/]*\{id\}[\w/]*)`", text_of("docs/reference/http.md"))
    targets = {resolve(method, path.replace("{id}", "an-id")).target for method, path in documented}
    calls = [call for calls in (SessionCall, KeyCall, FileCall, BatchCall, LocalCall) for call in calls]
    assert [call for call in calls if call not in targets | {target for _, _, target in ROUTES}] == []


@pytest.mark.parametrize("document", pages.PAGES)
def test_a_page_has_the_generated_lists_of_this_code(document: str) -> None:
    assert pages.page(document) == text_of(document), "write them anew: python -m tests.generated"


def test_every_error_code_of_an_answer_has_a_meaning() -> None:
    assert {code for _, code, _ in errors.found()} == set(errors.MEANINGS)


def test_a_list_without_its_place_in_the_page_is_seen() -> None:
    page = f"before\n{blocks.begin('a')}old\n{blocks.end('a')}\nafter\n"
    assert blocks.written(page, "a", "new") == f"before\n{blocks.begin('a')}\nnew\n\n{blocks.end('a')}\nafter\n"
    with pytest.raises(blocks.NoBlock):
        blocks.written(page, "b", "new")


def test_a_request_leads_through_few_modules() -> None:
    modules = re.findall(r"^\d+\. `([\w/.]+)`$", text_of("docs/explanation/architecture.md"), re.MULTILINE)
    assert 10 <= len(modules) <= MAX_MODULES_OF_A_REQUEST


def test_the_picture_of_the_rooms_is_of_this_code() -> None:
    assert rooms_picture.PICTURE.read_text() == rooms_picture.picture(House(sources(*SHIPPED))), (
        "draw it anew: python -m tests.rooms_picture"
    )


@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.name)
def test_the_pictures_of_the_explanations_are_of_this_code(file: Path) -> None:
    assert file.read_text() == PICTURES[file](), "draw it anew: python -m tests.pictures"


def test_every_field_and_header_of_the_contract_is_documented() -> None:
    """Body fields are in `CONSUMED`; headers are read by their bytes in the same module."""
    items = text_of("docs/reference/http.md").split("## What a client sends")[1].split("\n\n")[1].lower()
    headers = {name.decode() for name in re.findall(rb'b"([a-z-]+-[a-z-]+)"', CONTRACT.read_bytes())}
    assert headers >= {"x-session-id", "x-deadline-ms", "x-queue-status", "idempotency-key"}
    assert not [name for name in CONSUMED | headers if f"`{name}" not in items]


def words(text: str) -> int:
    """How many words `wc -w` counts."""
    return len(text.split())


def test_the_documents_can_be_read_in_a_day() -> None:
    pages_of_users = [document for document in DOCUMENTS if document == "README.md" or document.startswith("docs/")]
    assert len(pages_of_users) > 50
    assert sum(words(text_of(document)) for document in pages_of_users) <= MAX_WORDS


def test_bars_and_dashes_are_words() -> None:
    assert words("| `a` | two words |\n| --- | --- |\n- 3 GB: so it is") == 17
