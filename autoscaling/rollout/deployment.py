"""One deployment: the application is declared, followed until it runs, and undone if it fails.

Invariant: a change works as a whole or is undone, and both are in the audit record; two deployments never overlap, see
`exclusive`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from autoscaling.operations import application, serve_controller, status
from autoscaling.rollout import progress
from autoscaling.rollout.audit import AuditWriter
from autoscaling.rollout.declaration import declare
from serve_app.errors import DeployConflict, Unavailable
from serve_app.names import DEPLOYMENT_ACTOR, RELEASE, has_cpu_build
from serve_app.ray_adapter import claimed, existing
from serve_app.settings import split_arguments
from serve_app.store import AuditAction

PERIOD_S = 0.5  # between two looks at what starts
TRY_S = 0.2  # between two tries for the name
TRIES = 25  # an actor that is ended leaves its name within milliseconds, on a busy head within seconds
ANSWER_S = 5.0  # for whoever deploys to say so
ENDED = ("done", "failed", "rolled_back", "left")  # states of a deployment, see `deployer`


class Tell(Protocol):
    """Takes what happens: the event `phase` once it is built, then `status`."""

    def __call__(self, event: str, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Order:
    """What to deploy.

    Args:
        entry: of `applications` in Serve's configuration.
        models: their names.
        serve: options of Serve; none: those of the running one.
        wait: until it runs or has failed.
        roll_back: declare the previous application again if this one fails.
    """

    entry: Mapping[str, Any]
    models: tuple[str, ...]
    serve: Mapping[str, Any] = field(default_factory=dict)
    wait: bool = True
    roll_back: bool = True


def carry_out(order: Order, audit: AuditWriter, tell: Tell, is_left: Callable[[float], bool]) -> None:
    """Change a running application; tell its state, and the deployments in it that are waited for, until each of these
    is ready or one has failed (see `progress`). If one fails, the previous declaration is declared again.

    Args:
        is_left: waits for so many seconds; whether nobody follows any more.

    Raises:
        Unavailable: Serve cannot build deployments from it. Running deployments go on, but Serve would neither show nor
            scale them from then on, so the previous declaration is declared again.
    """
    before = declare(order.entry, **order.serve)
    previous = status.declared(before)
    recorded = audit.deployed(AuditAction.DEPLOY, previous, order.entry)
    while (made := status.is_built(application.details())) is None:
        if is_left(PERIOD_S):
            return
    if not made:
        why = status.describe(application.details(), order.models)["message"]
        if previous is not None and _is_of_this_release(previous):
            unrecorded = _roll_back(previous, order, audit)
            why = "; ".join(filter(None, (why, "the previous declaration is declared again", unrecorded)))
        raise Unavailable(f"Serve cannot build the application: {why}", code="deploy_failed")
    tell("phase", phase="declared")
    begun = progress.begun(order.entry, before, on_cpu=has_cpu_build())
    while order.wait:
        seen = progress.state_of(begun, application.details())
        state = application.application_status(order.models)
        if seen.failed and previous is not None and order.roll_back and _is_of_this_release(previous):
            unrecorded = _roll_back(previous, order, audit)
            state |= {"rolled_back": True, "message": "; ".join(filter(None, (state["message"], unrecorded)))}
        # Serve calls the application running a moment after its last deployment.
        done = seen.failed or (not seen.waits and (state["state"] == "running" or bool(state["unready"])))
        if (done or recorded.done()) and recorded.result():
            state["message"] = "; ".join(filter(None, (state["message"], recorded.result())))
        tell("status", **state, **asdict(seen))
        if done or is_left(PERIOD_S):
            return


def _roll_back(previous: Mapping[str, Any], order: Order, audit: AuditWriter) -> str:
    """Declare the previous application again. Returns why that is not in the audit record; empty: it is."""
    declare(previous, is_repeat=True, **order.serve)
    return audit.deployed(AuditAction.ROLL_BACK, order.entry, previous).result()


def _is_of_this_release(entry: Mapping[str, Any]) -> bool:
    """Whether Serve could build it here: the code of another release is not installed any more."""
    return split_arguments(entry.get("args") or {})[0] in (None, RELEASE)


class DriverDeployment:
    """Holds the name of deployments for a driver, and ends with it."""

    def look(self) -> dict[str, Any]:
        return {"id": "", "state": "deploying", "by": "the machine"}


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """While a driver deploys, nobody else does. Raises DeployConflict."""
    holder = begin_exclusively(DriverDeployment, outlives=False)
    try:
        yield
    finally:
        with contextlib.suppress(RayError, ValueError):  # Ray has ended it, or has ended
            ray.kill(holder)


def begin_exclusively(actor_class: type[Any], *arguments: Any, outlives: bool) -> ActorHandle[Any]:
    """An actor with the name of deployments. One that has ended its deployment makes room.

    Raises:
        DeployConflict: a deployment is under way.
    """
    for _ in range(TRIES):
        made = claimed(DEPLOYMENT_ACTOR, actor_class, *arguments, outlives=outlives, calls=4)
        if made is not None:
            return made
        _end_if_done()
        time.sleep(TRY_S)
    raise DeployConflict("another deployment has just ended; try again", retry_after_s=1.0)


def _end_if_done() -> None:
    """End the actor with the name, if its deployment has ended. Raises DeployConflict: it has not."""
    try:
        holder: Any = existing(DEPLOYMENT_ACTOR)
        found = serve_controller.answer_of(holder.look.remote(), ANSWER_S)
    except (ValueError, RayError):
        return  # it has just ended, or is about to
    except TimeoutError:
        raise DeployConflict("another deployment is under way, and does not answer", retry_after_s=10.0) from None
    if found["state"] in ENDED:
        ray.kill(holder)
        return
    name = f" ({found['id']})" if found["id"] else ""
    raise DeployConflict(f"another deployment{name} is under way, by {found['by']}", retry_after_s=10.0)
