"""A deployment that a key asked for by HTTP: an actor of its own carries it out, so that it goes on whatever becomes of
the client and of the router that took it.

    checking -> declaring -> waiting -> done | failed | rolled_back | left (not followed any longer)

Invariant: what is declared differs from what ran only in what `remote_settings` opens; both are compared while no other
deployment is under way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import ray

from autoscaling.operations import application, status
from autoscaling.rollout.audit import AuditWriter
from autoscaling.rollout.deployment import ENDED, Order, Tell, carry_out
from serve_app.core.messages import message
from serve_app.errors import DeployConflict, ServeAppError
from serve_app.names import RELEASE, has_cpu_build
from serve_app.settings import (
    Change,
    Settings,
    changes,
    configuration_digest,
    declared_settings,
    remote_settings,
)
from serve_app.settings import application as application_entry
from serve_app.store import Author
from serve_app.system import set_up_log

logger = logging.getLogger("ray.serve")

KEPT_S = 600.0  # after its end, for the client that asks how it ended
BEGIN_S = 60.0  # from the actor's start to the order: a router sends it at once

CarryOut = Callable[[Order, AuditWriter, Tell, Callable[[float], bool]], None]


@message
@dataclass(frozen=True, slots=True)
class DeployOrder:
    """What a key wants to deploy.

    Args:
        deployment_id: of the deployment.
        given: the configuration as it was sent.
        key_id, tenant: of the key.
        roll_back: undo it if it fails.
        timeout_s: it is followed so long.
    """

    deployment_id: str
    given: Mapping[str, Any]
    key_id: str
    tenant: str
    roll_back: bool = True
    timeout_s: float = 900.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A deployment that may begin.

    Args:
        entry: of `applications` in Serve's configuration; `settings`: the same.
        changes: what it does to each deployment.
        digests: of the configuration before and after.
    """

    entry: Mapping[str, Any]
    settings: Settings
    changes: tuple[Change, ...]
    digests: tuple[str, str]

    def plan(self) -> dict[str, Any]:
        """The changes as JSON values."""
        before, after = self.digests
        return {"changes": [asdict(one) for one in self.changes], "digest_before": before, "digest_after": after}


def prepare(details: Mapping[str, Any], given: Mapping[str, Any], tenant: str, *, on_cpu: bool) -> Prepared:
    """What a deploy of this configuration by HTTP would declare. Pure.

    Args:
        details: of Serve's applications.

    Raises:
        DeployConflict: what runs was not declared by this release, or its variables are known on the cluster alone.
        ConfigError, BadRequest, Forbidden: as `remote_settings`.
    """
    running = status.declared(details)
    if running is None:
        raise DeployConflict("what runs has no configuration in Serve: deploy it from the machine once")
    arguments = running["args"]
    try:
        release, settings = declared_settings(arguments)
    except (TypeError, ValueError, ServeAppError) as error:
        why = error.message if isinstance(error, ServeAppError) else error
        raise DeployConflict(f"the running configuration cannot be read ({why}): deploy from the machine") from None
    if release not in (None, RELEASE):
        raise DeployConflict(f"release {release} is declared and {RELEASE} runs: deploy from the machine")
    wanted = remote_settings(settings, given, tenant)
    entry = application_entry(wanted, import_path=running["import_path"])
    planned = tuple(changes(arguments, entry["args"], on_cpu=on_cpu))
    digests = configuration_digest(arguments), configuration_digest(entry["args"])
    return Prepared(entry, wanted, planned, digests)


def plan_remote(given: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """What a deploy would do, and the nodes that it would run on. Raises as `prepare`; Unavailable."""
    details = application.details(application.ANSWER_S)
    plan = prepare(details, given, tenant, on_cpu=has_cpu_build()).plan()
    found = status.deployed(details, ray.nodes(), application.ask_quota("devices"))
    return plan | {"nodes": found["nodes"], "replicas": found["replicas"]}


class Deployer:
    """The actor's class: one deployment.

    Args:
        deployment_id: of the deployment.
        carry, end, now: replaced in tests.
    """

    def __init__(
        self,
        deployment_id: str,
        by: str,
        carry: CarryOut = carry_out,
        end: Callable[[], None] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._end = end or _end_this_actor
        if end is None:
            set_up_log("deployment")
        self._carry = carry
        self._now = now
        self._lock = threading.Lock()
        self._state: dict[str, Any] = {
            "object": "deployment",
            "id": deployment_id,
            "by": by,
            "state": "checking",
            "message": "",
            "begun_at": now(),
            "ended_at": None,
        }
        self._later(BEGIN_S, self._end_if_unused)

    def look(self) -> dict[str, Any]:
        """How far it is."""
        with self._lock:
            return dict(self._state)

    def begin(self, order: DeployOrder) -> dict[str, Any]:
        """Check the configuration against what runs, then go on in a thread. Returns as `look`. Raises as `prepare`;
        Unavailable: Serve's controller does not answer."""
        details = application.details(application.ANSWER_S)
        prepared = prepare(details, order.given, order.tenant, on_cpu=has_cpu_build())
        self._set(state="declaring", **prepared.plan())
        threading.Thread(target=self._run, args=(order, prepared), name="deployment").start()
        return self.look()

    def _run(self, order: DeployOrder, prepared: Prepared) -> None:
        by = Author(order.key_id, order.tenant)
        deadline = time.monotonic() + order.timeout_s
        models = tuple(model.name for model in prepared.settings.models)
        logger.info("Deployment %s of key %s changed the application's declaration", order.deployment_id, order.key_id)

        def is_left(seconds: float) -> bool:
            time.sleep(seconds)
            return time.monotonic() >= deadline

        try:
            change = Order(prepared.entry, models, roll_back=order.roll_back)
            self._carry(change, AuditWriter(author=by), self._tell, is_left)
            if self.look()["state"] not in ENDED:
                text = f"does not run after {order.timeout_s:.0f} s and is not followed any more"
                self._set(state="left", message=text)
        except ServeAppError as error:
            self._set(state="failed", message=error.message)
        except Exception as error:
            name = order.deployment_id
            logger.exception("Deployment %s failed and is not followed any more. Report this traceback", name)
            self._set(state="failed", message=f"{type(error).__name__}: {error}")
        self._set(ended_at=self._now())
        found = self.look()
        logger.info("Deployment %s has ended: %s %s", order.deployment_id, found["state"], found["message"])
        self._later(KEPT_S, self._end)

    def _tell(self, event: str, **fields: Any) -> None:
        """Keep what `carry_out` tells."""
        if event == "phase":
            self._set(state="waiting")
            return
        names = ("message", "waits", "more", "unready")
        state = "waiting"
        if fields.get("rolled_back"):
            state = "rolled_back"
        elif status.FAILED in fields["waits"].values():
            state = "failed"
        elif not fields["waits"] and (fields["state"] == "running" or fields["unready"]):
            state = "done"
        self._set(state=state, **{name: fields[name] for name in names})

    def _set(self, **fields: Any) -> None:
        with self._lock:
            self._state |= fields

    def _end_if_unused(self) -> None:
        """The router that made this actor has ended before it said what to deploy, or the order was refused."""
        if self.look()["state"] == "checking":
            self._end()

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, work)
        timer.daemon = True
        timer.start()


def _end_this_actor() -> None:
    ray.kill(ray.get_runtime_context().current_actor)
