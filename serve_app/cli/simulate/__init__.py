"""`serve-app simulate`: what a configuration needs for recorded traffic, by the simulator.

Decides: the simulated world of a configuration, which runs are compared, which of them is recommended and why.
In: settings, engine profiles, a load. Out: a `Comparison`, its page and its picture.
Never: asks a cluster; guesses an engine's speed from a model's name.
"""

from serve_app.cli.simulate.arms import Arm, Configuration, arms_of, changed, level_of, what_if_of
from serve_app.cli.simulate.figures import ArmResult, ClassResult, Comparison, TraceSummary
from serve_app.cli.simulate.load import LoadOptions, load_of
from serve_app.cli.simulate.page import page, seconds
from serve_app.cli.simulate.picture import require_pictures, write_picture
from serve_app.cli.simulate.profiles import chosen_profiles
from serve_app.cli.simulate.run import run_arm
from serve_app.cli.simulate.verdict import money, percent, recommendation
from serve_app.cli.simulate.worlds import GpuBound, notes_on, world_of

__all__ = [
    "Arm",
    "ArmResult",
    "ClassResult",
    "Comparison",
    "Configuration",
    "GpuBound",
    "LoadOptions",
    "TraceSummary",
    "arms_of",
    "changed",
    "chosen_profiles",
    "level_of",
    "load_of",
    "money",
    "notes_on",
    "page",
    "percent",
    "recommendation",
    "require_pictures",
    "run_arm",
    "seconds",
    "what_if_of",
    "world_of",
    "write_picture",
]
