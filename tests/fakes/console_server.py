"""The endpoint as the console sees it: its files under the real policy, sessions, and answers of `console_data`.

A test changes its behaviour by `is_live_silent`, `is_away`, `missing` and `is_idle`; `calls` has the changes that the
page asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.fakes import console_data as data
from tests.waiting import wait_until

FILES = Path(__file__).resolve().parents[2] / "serve_app/http/console/files"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
COOKIE = "serve_app_console"
OPERATOR = "sk-operator-0123456789"
TENANT = "sk-product-0123456789"
NEW_KEY = "sk-new-key-that-is-shown-once"
CHAT_WORDS = ("It ", "waited ", "for ", "a slot.")
LIVE_S = 2.0
WORD_S = 0.05
HELD_S = 60.0  # of a chat that a test has forgotten
START_S = 10.0
OPERATORS_ONLY = ("events", "defrag", "drains", "logs", "audit", "keys", "quota", "status")

Json = dict[str, Any]


@dataclass
class ConsoleServer:
    """The fake's state.

    Attributes:
        url: its address, without a slash at the end.
        is_live_silent: the live view sends nothing more; `is_away`: every call ends without an answer.
        sessions: the tenant of each cookie; None: an operator's. A test revokes a key by removing its cookie.
        calls: method, path and body of what was to be changed.
        have_drains_ended: what drains has ended. chat_gate: while it is not set, a chat waits in the queue.
    """

    url: str = ""
    is_live_silent: bool = False
    is_away: bool = False
    is_idle: bool = False
    have_drains_ended: bool = False
    chat_gate: threading.Event = field(default_factory=threading.Event)
    missing: list[str] = field(default_factory=list)
    sessions: dict[str, str | None] = field(default_factory=dict)
    calls: list[tuple[str, str, Json]] = field(default_factory=list)
    keys: list[Json] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)

    def live(self, tenant: str | None) -> Json:
        found = data.live(time.time(), tenant) | {"missing": self.missing}
        if self.is_idle:
            for model in found["models"]:
                model |= {"queues": [], "waiting": 0, "running": model["wanted"], "state": "running", "reason": ""}
            found |= {"batches": [], "memory": found["memory"] | {"waiting": [], "sessions": []}}
        return found

    def reset(self) -> None:
        self.is_live_silent = self.is_away = self.is_idle = self.have_drains_ended = False
        self.chat_gate.set()
        self.missing = []
        self.calls.clear()
        self.cancelled.clear()
        self.keys = data.keys(time.time())


class Endpoint:
    """Answers the routes."""

    def __init__(self, server: ConsoleServer) -> None:
        self.server = server
        server.reset()

    def app(self) -> Starlette:
        changing = ["GET", "POST", "DELETE"]
        routes = [
            Route("/console", lambda _: RedirectResponse("console/", 308)),
            Route("/console/session", self.session, methods=changing),
            Route("/console/live", self.live),
            Route("/console/", self.file),
            Route("/console/{name}", self.file),
            Route("/admin/{path:path}", self.admin, methods=changing),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/{path:path}", self.v1, methods=changing),
        ]
        return Starlette(routes=routes)

    async def file(self, request: Request) -> Response:
        file = FILES / request.path_params.get("name", "index.html")
        if not file.is_file():
            return refused(404, "unknown_url", "no such file")
        answer = FileResponse(file)
        answer.headers["content-security-policy"] = POLICY
        return answer

    async def session(self, request: Request) -> Response:
        if self.server.is_away:
            return await no_answer()
        if request.method == "POST":
            key = (await request.json())["key"]
            if key not in (OPERATOR, TENANT):
                return refused(401, "invalid_api_key", "no such key")
            cookie = f"cookie-{len(self.server.sessions)}"
            self.server.sessions[cookie] = None if key == OPERATOR else "product"
            answer = Response(status_code=204)
            answer.set_cookie(COOKIE, cookie, httponly=True, samesite="strict")
            return answer
        if request.method == "DELETE":
            self.server.sessions.pop(request.cookies.get(COOKIE, ""), None)
            return Response(status_code=204)
        if not self.is_known(request):
            return refused(401, "invalid_api_key", "no key was sent")
        tenant = self.tenant(request)
        name = "platform-operator" if tenant is None else f"{tenant}-backend"
        classes = list(data.CLASSES if tenant is None else data.CLASSES[1:])
        models = list(data.MODELS)
        return JSONResponse(
            {
                "name": name,
                "tenant": tenant or "platform",
                "admin": tenant is None,
                "classes": classes,
                "models": models,
                "names": [data.NAME],
            }
        )

    def is_known(self, request: Request) -> bool:
        return request.cookies.get(COOKIE, "") in self.server.sessions

    def tenant(self, request: Request) -> str | None:
        return self.server.sessions[request.cookies[COOKIE]]

    async def live(self, request: Request) -> Response:
        if self.server.is_away:
            return await no_answer()
        if not self.is_known(request):
            return refused(401, "invalid_api_key", "no key was sent")
        cookie = request.cookies[COOKIE]

        async def objects() -> AsyncIterator[str]:
            while cookie in self.server.sessions and not self.server.is_away:
                if not self.server.is_live_silent:
                    yield f"event: live\ndata: {json.dumps(self.server.live(self.server.sessions[cookie]))}\n\n"
                for _ in range(int(LIVE_S / 0.1)):
                    if cookie in self.server.sessions and not self.server.is_away:
                        await asyncio.sleep(0.1)  # of the 2 s between two objects: it ends at once with its session

        return StreamingResponse(objects(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def admin(self, request: Request) -> Response:
        path = request.path_params["path"]
        found = await self.barred(request)
        if found is not None:
            return found
        tenant = self.tenant(request)
        first, *rest = path.split("/")
        if tenant is not None and first in OPERATORS_ONLY:
            return refused(403, "not_admin", "this key is not an operator's")
        body = await body_of(request)
        if request.method != "GET":
            self.server.calls.append((request.method, f"/admin/{path}", body))
        match first:
            case "keys":
                return self.keys(request.method, rest, body)
            case "drains":
                return self.drains(request.method, rest, body)
            case "requests" if rest:
                return self.receipt(rest[0], tenant)
            case "requests":
                return JSONResponse(self.requests(dict(request.query_params), tenant))
            case _:
                return JSONResponse(self.answer(first, dict(request.query_params), tenant, request.method))

    async def barred(self, request: Request) -> Response | None:
        """Why a call is not answered."""
        if self.server.is_away:
            return await no_answer()
        if not self.is_known(request):
            return refused(401, "invalid_api_key", "no key was sent")
        if request.method != "GET" and request.headers.get("x-serve-app-console") != "1":
            return refused(403, "csrf", "the header X-Serve-App-Console is missing")
        return None

    def answer(self, first: str, query: dict[str, str], tenant: str | None, method: str) -> Json:
        now = time.time()
        match first:
            case "history":
                if query.get("name"):
                    rows = [] if self.server.is_idle else data.history_of_name(now)
                    return {"object": "history", "step_s": None, "by": "model", **complete(rows)}
                step_s = int(query.get("step_s", "60"))
                since = data.datetime.fromisoformat(query["since"]).timestamp()
                rows = [] if self.server.is_idle else data.history(now, since, step_s, query["by"], tenant)
                return {"object": "history", "step_s": step_s, "by": query["by"], **complete(rows)}
            case "events":
                events = [event for event in data.events(now) if event["kind"] == query.get("kind", event["kind"])]
                return {"object": "list", **complete([] if self.server.is_idle else events)}
            case "usage":
                rows = [] if self.server.is_idle else data.usage(query["by"], tenant)
                return {"object": "list", "by": query["by"].split(","), "data": rows}
            case "audit":
                rows = [] if self.server.is_idle else data.audit(now)
                return {"object": "list", "data": rows, "has_more": False, "next_cursor": "3"}
            case "logs":
                return {"object": "list", "data": [] if self.server.is_idle else data.logs(now)}
            case _:
                return data.defrag_plan() | {"begun": method == "POST"}

    def requests(self, query: dict[str, str], tenant: str | None) -> Json:
        now = time.time()
        rows = [] if self.server.is_idle else data.waiting(now) if query.get("waiting") else data.records(now)
        if tenant is not None:
            rows = [row for row in rows if row["tenant"] == tenant]
        fields = {"tenant": "tenant", "model": "model", "class": "request_class", "outcome": "outcome"}
        if asked := query.get("name"):
            rows = [row for row in rows if asked == (row["asked_model"] or row["model"])]
        for name, own in fields.items():
            rows = [row for row in rows if query.get(name, row[own]) == row[own]]
        if query.get("failed"):
            rows = [row for row in rows if row["outcome"] in ("engine_failed", "internal_error")]
        if query.get("slow"):
            rows = sorted(rows, key=lambda row: float(row["total_s"]), reverse=True)
        return {"object": "list", **complete(rows[: int(query.get("limit", "100"))])}

    def receipt(self, request_id: str, tenant: str | None) -> Response:
        rows = [row for row in data.records(time.time()) if tenant in (None, row["tenant"])]
        found = next((row for row in rows if request_id.removeprefix("chatcmpl-") == row["request_id"]), None)
        if request_id == "chat-answer":
            found = rows[0] | {"request_id": request_id}
        if found is None:
            return refused(404, "request_not_found", f"no request '{request_id}' is known to this key")
        own = {name: value for name, value in found.items() if name not in data.OF_RECORDS}
        return JSONResponse(own | {"waits": found["waited_for"], "waited_for": next(iter(found["waited_for"]), None)})

    def keys(self, method: str, rest: list[str], body: Json) -> Response:
        server = self.server
        if not rest and method == "GET":
            return JSONResponse({"object": "list", "data": server.keys})
        if not rest:
            if len(body["name"]) > 40:
                return refused(400, "bad_request", "`name` is too long", "name")
            made = data.key_of(body["name"], body["tenant"], time.time()) | body | {"id": f"key_{len(server.keys)}"}
            server.keys.append(made)
            return JSONResponse(made | {"key": NEW_KEY}, 201)
        key = next(one for one in server.keys if one["id"] == rest[0])
        if method == "DELETE":
            key |= {"state": "revoked"}
        elif rest[1:] == ["rotate"]:
            return JSONResponse(key | {"key": NEW_KEY})
        elif method == "POST":
            key |= {"limits": {name: value for name, value in body["limits"].items() if value is not None}}
        return JSONResponse(key | {"effective_limits": {"tenant": {"tokens_per_day": 40_000_000}}})

    def drains(self, method: str, rest: list[str], body: Json) -> Response:
        if method == "POST":
            if body["name"] == "10.0.0.11":
                return refused(400, "is_head", "10.0.0.11 is the head, which cannot be drained", "name")
            return JSONResponse(
                {"object": "drain", "id": body["name"], "is_node": False, "limit_s": None, "unrecorded": ""}
            )
        has_ended = self.server.have_drains_ended
        row = {"replica": rest[0], "model": "chat-70b", "why": "asked", "ended": has_ended, "final": has_ended,
               "running": 0 if has_ended else 3, "finished": 2 if has_ended else 0, "moved": 1 if has_ended else 0,
               "left_s": 0.0 if has_ended else 30.0}  # fmt: skip
        return JSONResponse({"object": "drain", "id": rest[0], "is_node": False, "rows": [row], "left": []})

    async def v1(self, request: Request) -> Response:
        found = await self.barred(request)
        if found is not None:
            return found
        path = request.path_params["path"]
        if path == "models":
            cards = [{"id": name, "object": "model"} for name in data.MODELS]
            return JSONResponse({"object": "list", "data": [*cards, {"id": data.NAME, "route": data.ROUTE}]})
        if request.method != "GET":
            self.server.calls.append((request.method, f"/v1/{path}", await body_of(request)))
            self.server.cancelled.add(path.split("/")[1])
        rows = [] if self.server.is_idle else data.own_batches(time.time(), self.tenant(request) or "platform")
        return JSONResponse({"object": "list", "data": rows, "has_more": False})

    async def chat(self, request: Request) -> Response:
        found = await self.barred(request)
        if found is not None:
            return found
        body = await body_of(request)
        self.server.calls.append(("POST", "/v1/chat/completions", body))
        if body["messages"][-1]["content"] == "refuse":
            return refused(429, "queue_full", "the queue is full")
        is_endless = body["messages"][-1]["content"] == "endless"

        async def parts() -> AsyncIterator[str]:
            yield ": queue position=2 expected_start_s=0.4\n\n"
            await asyncio.to_thread(self.server.chat_gate.wait, HELD_S)
            words = CHAT_WORDS if not is_endless else CHAT_WORDS * 100
            for word in words:
                await asyncio.sleep(WORD_S)  # as an engine: a stop comes in the middle
                chunk = {"id": "chatcmpl-x", "choices": [{"delta": {"content": word}}]}
                yield f"data: {json.dumps(chunk | {'id': 'chat-answer'})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(
            parts(), media_type="text/event-stream", headers={"x-serve-app-request-id": "chat-answer"}
        )


def complete(rows: list[Json]) -> Json:
    return {"data": rows, "complete": True, "missing": []}


def refused(status: int, code: str, message: str, param: str | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "code": code, "param": param, "type": "error"}}, status)


async def body_of(request: Request) -> Json:
    content = await request.body()
    return json.loads(content) if content else {}


async def no_answer() -> Response:
    """Ends the connection in the middle, as an endpoint that dies."""

    async def nothing() -> AsyncIterator[bytes]:
        raise ConnectionResetError
        yield b""

    return StreamingResponse(nothing())


@contextlib.contextmanager
def console_server() -> Iterator[ConsoleServer]:
    """Serves on a free port while the context is open."""
    server = ConsoleServer()
    running = uvicorn.Server(
        uvicorn.Config(Endpoint(server).app(), port=0, log_level="critical", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    wait_until(lambda: running.started, START_S, "the fake endpoint's start")
    server.url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        server.sessions.clear()
        running.should_exit = True
        thread.join(START_S)
