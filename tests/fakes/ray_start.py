"""Stands in for `ray.scripts.scripts start` where a test is about keepers and not about Ray.

`install` makes a package `ray` that has nothing else; its `start` leaves a `gcs_server` (head), a `raylet`, an agent
and a bystander behind, and ends, as Ray does. What it does is told by FAKE_RAY: `run`, `stubborn` (the agent ignores
SIGTERM), `refuse` (does not start), `late` (its first two starts exceed Ray's time) or `silent` (never ends).
FAKE_RAY_LOG gets a line for each start: how many processes with the mark were there before, and the arguments.
"""

from __future__ import annotations

from pathlib import Path

STAY_S = 600  # longer than any test

SCRIPT = f"""
import os, subprocess, sys, time

from serve_app.system.processes import marked
from serve_app.names import MARK

DAEMON = "import signal, sys, time; signal.signal(signal.SIGTERM, getattr(signal, sys.argv[2])); time.sleep({STAY_S})"

def daemon(name, on_term):
    subprocess.Popen([sys.executable, "-c", DAEMON, name, on_term], start_new_session=True,
                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

if sys.argv[1] != "start":
    print("ray", *sys.argv[1:], os.environ.get("RAY_ADDRESS"), os.environ.get("RAY_SERVE_ENABLE_HA_PROXY"))
    sys.exit(0)
mode = os.environ.get("FAKE_RAY", "run")
before = marked(os.environ[MARK], spare=(os.getpid(), os.getppid()))
with open(os.environ["FAKE_RAY_LOG"], "a") as log:
    print(len(before), *sys.argv[2:], file=log)
if mode == "refuse":
    print("the disk is full")
    sys.exit(1)
if mode == "late" and len(open(os.environ["FAKE_RAY_LOG"]).readlines()) < 3:
    daemon("raylet", "SIG_DFL")
    print("Exception: The current node timed out during startup.")
    sys.exit(1)
if mode == "silent":
    time.sleep({STAY_S})
if "--head" in sys.argv:
    daemon("gcs_server", "SIG_DFL")
daemon("raylet", "SIG_DFL")
daemon("bystander", "SIG_DFL")
daemon("agent", "SIG_IGN" if mode == "stubborn" else "SIG_DFL")
print("Ray runtime started.")
"""


def install(folder: Path) -> None:
    """Make the package below `folder`, which is to come first on the search path."""
    scripts = folder / "ray" / "scripts"
    scripts.mkdir(parents=True)
    (folder / "ray" / "__init__.py").write_text("")
    (scripts / "__init__.py").write_text("")
    (scripts / "scripts.py").write_text(SCRIPT)
