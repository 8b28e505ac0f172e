"""Where a request has schemas that its answer must satisfy, and the request with those schemas as they are enforced."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.core.schemas.budget import SchemaBudget
from serve_app.core.schemas.rewrite import enforced
from serve_app.errors import BadRequest

Enforce = Callable[..., Any]  # `enforced`, with the budget of the request


def with_enforced_schemas(
    body: Mapping[str, Any], tool_strict: bool, budget: SchemaBudget | None = None
) -> dict[str, Any]:
    """The body of a chat completion, completion or response; the client's own is not changed. What has the wrong shape
    is left as it is, for the validation after this.

    Args:
        tool_strict: the arguments of calls that `tool_choice` demands satisfy their schemas, without `strict`, too.
        budget: of all its schemas together; None: the large one.

    Raises:
        BadRequest: `param` is the path of the keyword that cannot be enforced. TooManyParts: see `budget`.
    """
    found = dict(body)
    read = functools.partial(enforced, budget=budget or SchemaBudget())
    if isinstance(body.get("response_format"), dict):
        found["response_format"] = _response_format(body["response_format"], read)
    if isinstance(body.get("structured_outputs"), dict):
        found["structured_outputs"] = _structured_outputs(body["structured_outputs"], read)
    text = body.get("text")
    if isinstance(text, dict) and isinstance(text.get("format"), dict):
        form = text["format"]
        if form.get("type") == "json_schema" and form.get("schema") is not None:
            form = {**form, "schema": read(form["schema"], "text.format.schema")}
        found["text"] = {**text, "format": form}
    if isinstance(body.get("tools"), list):
        calls = _Calls(body.get("tool_choice"), tool_strict, read)
        found["tools"] = [calls.tool(one, f"tools.{number}") for number, one in enumerate(body["tools"])]
    return found


def _response_format(form: dict[str, Any], read: Enforce) -> dict[str, Any]:
    inner = form.get("json_schema")
    if form.get("type") == "json_schema" and isinstance(inner, dict) and inner.get("schema") is not None:
        schema = read(inner["schema"], "response_format.json_schema.schema")
        return {**form, "json_schema": {**inner, "schema": schema}}
    if form.get("type") == "structural_tag":
        return {name: _tagged(value, f"response_format.{name}", read) for name, value in form.items()}
    return form


def _structured_outputs(given: dict[str, Any], enforce: Enforce) -> dict[str, Any]:
    found = dict(given)
    if given.get("choice") == []:
        raise BadRequest("`structured_outputs.choice` is an empty list", param="structured_outputs.choice")
    for name, read in (("json", enforce), ("structural_tag", functools.partial(_tagged, read=enforce))):
        value = given.get(name)
        path = f"structured_outputs.{name}"
        if isinstance(value, str):
            try:
                parsed = json.loads(value)
            except ValueError as error:
                raise BadRequest(f"`{path}` is no JSON: {error}", param=path) from None
            made = read(parsed, path)
            found[name] = value if made == parsed else json.dumps(made)
        elif value is not None:
            found[name] = read(value, path)
    return found


def _tagged(value: Any, path: str, read: Enforce) -> Any:
    """A part of a structural tag with its schemas, which stand anywhere in it."""
    if isinstance(value, list):
        return [_tagged(one, f"{path}.{number}", read) for number, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    schema = "json_schema" if value.get("type") == "json_schema" else "schema" if "begin" in value else ""
    return {
        name: read(one, f"{path}.{name}") if name == schema else _tagged(one, f"{path}.{name}", read)
        for name, one in value.items()
    }


class _Calls:
    """Which tools are called only with arguments that satisfy their schema: those with `strict`, and demanded ones."""

    def __init__(self, choice: Any, tool_strict: bool, read: Enforce) -> None:
        self._read = read
        self._is_none = choice == "none"
        self._demands = tool_strict and choice not in (None, "none", "auto")
        self._names: list[Any] | None = None  # of those that may be called; None: all
        self._met: dict[str, str] = {}
        if isinstance(choice, dict):
            nested = choice.get("allowed_tools")
            allowed = nested if isinstance(nested, dict) else choice
            listed = allowed.get("tools") if choice.get("type") == "allowed_tools" else [choice]
            self._names = [_name(one) for one in listed] if isinstance(listed, list) else None
            self._demands = self._demands and allowed.get("mode") != "auto"

    def tool(self, tool: Any, path: str) -> Any:
        """The tool with its schema as it is enforced. Raises BadRequest."""
        if not isinstance(tool, dict) or self._is_none:
            return tool
        if tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            inner = [self._function(one, f"{path}.tools.{at}", True) for at, one in enumerate(tool["tools"])]
            return {**tool, "tools": inner}
        if tool.get("type") not in (None, "function"):  # of a chat, it is one without a type, too
            return tool
        is_nested = isinstance(tool.get("function"), dict)
        function = tool["function"] if is_nested else tool
        is_called = self._names is None or function.get("name") in self._names
        made = self._function(function, f"{path}.function" if is_nested else path, is_called)
        return {**tool, "function": made} if is_nested else made

    def _function(self, function: Any, path: str, is_called: bool) -> Any:
        if not isinstance(function, dict) or not is_called:
            return function
        if not self._demands and function.get("strict") is not True:
            return function
        schema = function.get("parameters")
        made = self._read(True if schema is None else schema, f"{path}.parameters", is_object=True, met=self._met)
        return {**function, "parameters": made, "strict": True}


def _name(choice: Any) -> Any:
    """The name of the tool that a choice, or a tool in it, names."""
    function = choice.get("function", choice) if isinstance(choice, dict) else {}
    return function.get("name") if isinstance(function, dict) else None
