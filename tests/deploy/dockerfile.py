"""A Dockerfile as data, and its steps on root file systems of Debian's packages: no registry of images is in reach.

`read` parses what deploy/Dockerfile uses of the language. `Builder` executes it: FROM makes a root file system with
mmdebstrap (or copies that of an earlier stage), COPY copies, RUN runs in it by chroot in namespaces of mounts and
processes. What a registry's image has beside these packages, image layers and BuildKit's cache are not tested by that.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RELEASE = {"debian:bookworm-slim": "bookworm"}
STEP_S = 900.0  # the longest is the installation: two minutes on an idle machine
PIP_FILES = ("/etc/pip.conf", "/etc/xdg/pip")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # of this machine; a root gets its own there, by a package's rename
CERTIFICATES_IN = "/etc/ssl/machine.crt"


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction: its name, its `--options` and the rest."""

    name: str
    options: tuple[str, ...]
    rest: str

    @property
    def words(self) -> list[str]:
        """The arguments; of the exec form those in its list."""
        return json.loads(self.rest) if self.rest.startswith("[") else shlex.split(self.rest)


@dataclass(slots=True)
class Stage:
    """What the steps of a stage have made so far."""

    base: str
    name: str
    steps: list[Step] = field(default_factory=list)

    def last(self, name: str) -> Step:
        return [step for step in self.steps if step.name == name][-1]

    def environment(self) -> dict[str, str]:
        """Of all its ENV instructions."""
        words = [word.partition("=") for step in self.steps if step.name == "ENV" for word in step.words]
        return {name: value for name, _, value in words}


def read(text: str) -> list[Stage]:
    """The stages of a Dockerfile.

    Raises:
        ValueError: an instruction before the first FROM.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    stages: list[Stage] = []
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        name, _, rest = line.strip().partition(" ")
        options: list[str] = []
        while rest.lstrip().startswith("--"):
            option, _, rest = rest.lstrip().partition(" ")
            options.append(option)
        step = Step(name, tuple(options), rest.strip())
        if name == "FROM":
            base, *alias = step.words
            stages.append(Stage(base, alias[1] if alias else ""))
        elif stages:
            stages[-1].steps.append(step)
        else:
            raise ValueError(f"{name} before the first FROM")
    return stages


class Builder:
    """Root file systems below `folder`, one a stage. Needs root, mmdebstrap and Debian's packages."""

    def __init__(self, context: Path, folder: Path, arguments: Mapping[str, str]) -> None:
        self._context = context
        self._folder = folder
        self._given = dict(arguments)
        self._roots: dict[str, Path] = {}

    def build(self, stages: Sequence[Stage]) -> Path:
        """The root file system of the last stage."""
        for number, stage in enumerate(stages):
            root = self._folder / (stage.name or f"stage{number}")
            if stage.base in self._roots:
                subprocess.run(["cp", "-a", "--reflink=auto", self._roots[stage.base], root], check=True)
            else:
                debian = ["mmdebstrap", "--quiet", "--variant=minbase", *apt_options(), RELEASE[stage.base], str(root)]
                subprocess.run(debian, check=True, timeout=STEP_S)
            self._roots[stage.name or str(number)] = root
            self._execute(stage, root)
        return root

    def _execute(self, stage: Stage, root: Path) -> None:
        variables: dict[str, str] = {}
        folder = "/"
        for step in stage.steps:
            match step.name:
                case "ARG":
                    name, _, default = step.rest.partition("=")
                    variables[name] = self._given.get(name, default)
                case "ENV":
                    variables |= dict(word.split("=", 1) for word in step.words)
                case "WORKDIR":
                    folder = step.rest
                    (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
                case "COPY":
                    self._copy(step, root, folder)
                case "RUN":
                    print(f"RUN {step.rest}", flush=True)
                    run_in(root, ["/bin/sh", "-c", step.rest], folder=folder, environment=variables, timeout_s=STEP_S)

    def _copy(self, step: Step, root: Path, folder: str) -> None:
        *sources, target = step.words
        source_root = self._context
        for option in step.options:
            if option.startswith("--from="):
                source_root = self._roots[option.removeprefix("--from=")]
        into = root / (Path(folder) / target).as_posix().lstrip("/")
        for source in sources:
            found = source_root / source.lstrip("/")
            to = into / found.name if target.endswith("/") else into
            to.parent.mkdir(parents=True, exist_ok=True)
            if source_root is not self._context:
                found.rename(to)  # a stage that is copied from once
            elif found.is_dir():
                shutil.copytree(found, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(found, to)


def apt_options() -> list[str]:
    """How apt of this machine reaches its packages, as mmdebstrap's options, which leaves them in the root."""
    reported = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    return [
        f"--aptopt={line}" for line in reported.splitlines() if re.match("Acquire::(Check-|https?::|Retries)", line)
    ]


def pip_paths() -> list[str]:
    """Files and folders of this machine that pip's configuration here consists of, or names."""
    reported = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    named = re.findall(r"(?:(?<=file://)|(?<=['\s]))/[\w./-]+", reported.stdout)
    # of `file:///x/simple`, x: a page of the index may link beside it
    folders = [str(Path(name).parent) if name.endswith("/simple") else name for name in named]
    return sorted({path for path in (*PIP_FILES, *folders) if Path(path).exists()} - {CERTIFICATES})


def command_in(
    root: Path, command: Sequence[str], *, folder: str, user: str = "0:0", layer: Path | None = None
) -> list[str]:
    """`command` as the first process of namespaces with this root; the network is the caller's.

    Args:
        layer: an empty folder, not on an overlay itself; gets what is written, as a container's layer does. None: the
            root gets it.
    """
    mounts = {path: path for path in ("/dev", "/sys", "/etc/resolv.conf", "/etc/hosts", *pip_paths())}
    mounts[CERTIFICATES] = CERTIFICATES_IN
    lines = ["set -e", f"cd {shlex.quote(str(layer or root))}"]
    if layer is not None:
        lines += [
            "mkdir upper work root",
            f"mount -t overlay -o lowerdir={root},upperdir=upper,workdir=work overlay root",
        ]
        lines.append("cd root")
    for path, inside in mounts.items():
        make = f"mkdir -p .{inside}" if Path(path).is_dir() else f"mkdir -p .{Path(inside).parent} && touch .{inside}"
        lines.append(f"{make} && mount --rbind {path} .{inside}")
    lines.append("mkdir -p proc && mount -t proc proc proc")
    entered = [
        "/usr/sbin/chroot",
        f"--userspec={user}",
        ".",
        "/bin/sh",
        "-c",
        f'cd {shlex.quote(folder)} && exec "$@"',
        "sh",
    ]
    lines.append(f"exec {shlex.join([*entered, *command])}")
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", "\n".join(lines)]


def environment_in(variables: Mapping[str, str]) -> dict[str, str]:
    """What a step finds in its environment: pip's settings of this machine, the image's variables."""
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, **pip, "PIP_CERT": CERTIFICATES_IN, **variables}


def run_in(
    root: Path, command: Sequence[str], *, folder: str, environment: Mapping[str, str], timeout_s: float
) -> None:
    """Raises CalledProcessError or TimeoutExpired."""
    line = command_in(root, command, folder=folder)
    subprocess.run(line, env=environment_in(environment), check=True, timeout=timeout_s)
