"""Schemas as common libraries make them, which must all pass: pydantic, zod-to-json-schema, zod 4, the OpenAI SDK's
strict mode, LangChain, instructor, and MCP servers in TypeScript, Rust and C#."""

from __future__ import annotations

import datetime
import enum
import uuid
from typing import Annotated, Any, Literal

import pydantic
from openai.lib._pydantic import to_strict_json_schema


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Part(pydantic.BaseModel):
    """A part, with its parts."""

    title: str = pydantic.Field(description="its title", min_length=1, max_length=20)
    weight: float = pydantic.Field(ge=0, lt=1000.5)
    count: int = pydantic.Field(gt=0, le=10)
    parts: list[Part] = []


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Pet(pydantic.BaseModel):
    """Instructor's and LangChain's models are such ones."""

    model_config = pydantic.ConfigDict(extra="forbid")

    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    colour: Colour = Colour.RED
    colours: list[Colour] | None = None
    born: datetime.date | None = pydantic.Field(default=None, description="its birthday", examples=["2020-01-01"])
    seen: datetime.datetime
    id: uuid.UUID
    pair: tuple[int, str]
    size: Annotated[str, pydantic.Field(pattern=r"^[SML]$")] = "M"
    scores: dict[str, float] = {}
    either: int | str | None
    anything: Any = None
    secret: pydantic.SecretStr | None = None
    by_colour: dict[Literal["red", "blue"], int] = {}
    more: list[dict[str, Part]] = pydantic.Field(default_factory=list, min_length=0, max_length=4)


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", title="It")

    part: Part | None = pydantic.Field(None, title="A part", description="with siblings of a reference")
    choice: Literal["a", 1, None] = None


ZOD: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "age": {"type": "integer", "exclusiveMinimum": 0},
            "email": {"type": "string", "format": "email"},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 5},
            "role": {"type": "string", "enum": ["admin", "user"]},
            "maybe": {"type": ["string", "null"]},
            "nested": {
                "anyOf": [{"type": "object", "properties": {}, "additionalProperties": False}, {"type": "null"}]
            },
            "record": {"type": "object", "additionalProperties": {"type": "number"}},
            "literal": {"type": "string", "const": "x"},
            "when": {"type": "string", "format": "date-time"},
            "again": {"$ref": "#/properties/tags"},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
    "named": {
        "$ref": "#/definitions/Args",
        "definitions": {"Args": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}},
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
    "tuple": {
        "type": "object",
        "properties": {"at": {"type": "array", "minItems": 2, "maxItems": 2, "items": [{"type": "number"}] * 2}},
        "required": ["at"],
        "additionalProperties": False,
    },
    "intersection": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "number"}}, "required": ["b"]},
        ]
    },
    "union": {
        "anyOf": [
            {"type": "object", "properties": {"t": {"type": "string", "const": name}}, "required": ["t"]}
            for name in ("a", "b")
        ]
    },
    "zod 4": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
            "m": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
            "u": {
                "oneOf": [
                    {"type": "object", "properties": {"t": {"type": "string", "const": name}}, "required": ["t"]}
                    for name in ("a", "b")
                ]
            },
            "id": {"type": "string", "format": "uuid", "pattern": "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4})$"},
            "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]},
        },
        "required": ["n", "m"],
        "additionalProperties": False,
    },
}

OTHERS: dict[str, dict[str, Any]] = {
    "OpenAI's strict mode": {
        "type": "object",
        "properties": {
            "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}},
            "answer": {"type": ["string", "null"], "description": "the answer"},
            "child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "$defs": {
            "step": {
                "type": "object",
                "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                "required": ["explanation", "output"],
                "additionalProperties": False,
            }
        },
        "required": ["steps", "answer", "child"],
        "additionalProperties": False,
    },
    "pydantic 2.8: a single allOf beside a default": {
        "type": "object",
        "properties": {"c": {"allOf": [{"$ref": "#/definitions/C"}], "default": "red", "title": "C"}},
        "definitions": {"C": {"enum": ["red", "blue"], "title": "C", "type": "string"}},
    },
    "LangChain: titles everywhere": {
        "title": "search",
        "description": "Searches.",
        "type": "object",
        "properties": {
            "title": {"title": "Title", "type": "string"},
            "default": {"title": "Default", "anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        },
        "required": ["title"],
    },
    "Rust's schemars": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "limit": {"type": ["integer", "null"], "format": "uint32", "minimum": 0},
            "ratio": {"type": "number", "format": "double"},
            "mode": {"oneOf": [{"const": "fast", "type": "string"}, {"const": "slow", "type": "string"}]},
            "kind": {
                "oneOf": [
                    {"enum": ["a", "b"], "type": "string"},
                    {
                        "type": "object",
                        "required": ["c"],
                        "properties": {"c": {"type": "string"}},
                        "additionalProperties": False,
                    },
                ]
            },
        },
    },
    "C#": {
        "type": "object",
        "properties": {
            "city": {"description": "The city", "type": "string"},
            "unit": {"type": ["string", "null"], "enum": ["c", "f", None], "default": None},
            "when": {"type": "string", "format": "date-time"},
        },
        "required": ["city"],
    },
    "OpenAPI 3.0": {
        "type": "object",
        "properties": {
            "a": {"type": "string", "nullable": True, "example": "x", "x-order": 1},
            "b": {"type": "integer", "format": "int64", "xml": {"name": "b"}},
        },
    },
    "an MCP tool without arguments": {"type": "object", "properties": {}, "additionalProperties": False},
    "any object": {"type": "object"},
    "at least one": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
}

ORDINARY: dict[str, dict[str, Any]] = {
    **{f"pydantic {model.__name__}": model.model_json_schema() for model in (Part, Pet, Open, Cat)},
    **{f"pydantic strict {model.__name__}": to_strict_json_schema(model) for model in (Part, Cat, Dog)},
    **{f"zod {name}": schema for name, schema in ZOD.items()},
    **OTHERS,
}
