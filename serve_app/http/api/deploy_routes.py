"""Deployments by HTTP, for keys with `deploy`; an operator's right alone does not suffice.

    POST /admin/deploys         {"configuration": {...}, "plan_only", "roll_back", "timeout_s"} -> 202 and its state
    GET  /admin/deploys         the deployment that runs, or the last one of the past minutes; for operators, too
    GET  /admin/deploys/{id}    how far it is

With `plan_only` nothing changes: the answer says what would. What a deployment may change is in
`serve_app.settings.remote_changes`; what it has changed is in the audit record, with the key.

Invariant: a deployment that has begun goes on to its end, whatever becomes of the client and of this router; no answer
has a value of the running configuration that came from a variable.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from autoscaling.rollout import DeployOrder
from serve_app.errors import BadRequest, ConfigError, Forbidden, NotFound, Unavailable
from serve_app.http.api.key_routes import NO_DEPLOY
from serve_app.http.api.routes import SHOWN_ID_CHARS, DeployCall, HttpRoute
from serve_app.http.error_responses import JSON, Answer
from serve_app.http.fields import parse_fields
from serve_app.ray_adapter import NO_ANSWER, in_fresh_context
from serve_app.types import Identity

BEGIN_TIMEOUT_S = 60.0  # the deployment's process starts within seconds, on a loaded head within tens
LOOK_TIMEOUT_S = 8.0  # it answers in milliseconds
DEFAULT_FOLLOW_S = 900.0  # a large model loads for ten minutes from a cold disk
MAX_FOLLOW_S = 86_400.0

ReadBody = Callable[[], Awaitable[tuple[Mapping[str, Any], bytes]]]  # decoded, and as it was sent


class DeployCalls(Protocol):
    """What is asked of the cluster. Each raises `NO_ANSWER` or Unavailable while that does not answer."""

    def plan_deploy(self, given: Mapping[str, Any], tenant: str) -> Awaitable[dict[str, Any]]:
        """As `plan_remote`."""

    def begin_deploy(self, order: DeployOrder) -> Awaitable[dict[str, Any]]:
        """As `Deployer.begin`. Raises DeployConflict."""

    def look_at_deploy(self) -> Awaitable[dict[str, Any] | None]:
        """As `Deployer.look`; None: none is under way, and none was."""


class _DeployFields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    configuration: dict[str, Any]
    plan_only: bool = False
    roll_back: bool = True
    timeout_s: float = Field(DEFAULT_FOLLOW_S, ge=1, le=MAX_FOLLOW_S)


class DeployRoutes:
    """Answers the routes."""

    def __init__(self, cluster: DeployCalls) -> None:
        self._cluster = cluster

    async def answer(self, route: HttpRoute, identity: Identity, read: ReadBody) -> Answer:
        """The complete answer.

        Raises:
            Forbidden: the key may not deploy, or the configuration changes what only the machine does.
            BadRequest: a wrong field, or a wrong setting, see `param`. DeployConflict: another deployment is under way.
            NotFound: no such deployment is known. Unavailable: Serve's controller does not answer.
        """
        if route.target is DeployCall.DEPLOY:
            if not identity.deploy:
                raise Forbidden("this key may not deploy: set deploy on it (auth.keys)", code=NO_DEPLOY)
            return await self._deploy(parse_fields(_DeployFields, (await read())[0]), identity)
        if not (identity.deploy or identity.admin):
            raise Forbidden("this key may neither deploy nor do what operators do (auth.keys)", code=NO_DEPLOY)
        found = await _answered(self._cluster.look_at_deploy(), LOOK_TIMEOUT_S)
        if route.target is DeployCall.LIST:
            return 200, JSON, msgspec.json.encode({"object": "list", "data": [] if found is None else [found]})
        if found is None or found["id"] != route.argument:
            shown = route.argument[:SHOWN_ID_CHARS]
            raise NotFound(
                f"no deployment {shown!r} is known; `serve-app audit` has those of the past", code="deploy_not_found"
            )
        return 200, JSON, msgspec.json.encode(found)

    async def _deploy(self, asked: _DeployFields, identity: Identity) -> Answer:
        if asked.plan_only:
            plan = await _answered(self._cluster.plan_deploy(asked.configuration, identity.tenant), BEGIN_TIMEOUT_S)
            return 200, JSON, msgspec.json.encode({"object": "deployment_plan", **plan})
        order = DeployOrder(
            f"deploy_{secrets.token_hex(8)}",
            asked.configuration,
            identity.key_id,
            identity.tenant,
            asked.roll_back,
            asked.timeout_s,
        )
        begun = _answered(self._cluster.begin_deploy(order), BEGIN_TIMEOUT_S)
        found = await asyncio.shield(in_fresh_context(begun, "deploy"))  # also if the client leaves
        return 202, JSON, msgspec.json.encode(found)


async def _answered(asked: Awaitable[Any], within_s: float) -> Any:
    """The answer. Raises Unavailable: there is none in this time. BadRequest: a wrong configuration was sent."""
    try:
        async with asyncio.timeout(within_s):
            return await asked
    except ConfigError as error:
        raise BadRequest(error.message, param=error.param) from None
    except NO_ANSWER as error:
        text = (
            "Serve's controller does not answer at the moment; GET /admin/deploys says whether a deployment has begun"
        )
        raise Unavailable(text, code="no_controller") from error
