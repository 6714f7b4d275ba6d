"""JSON schemas as people write them for extraction, tools and settings; random answers to each of them end."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

_NAME = {"type": "string", "minLength": 1, "maxLength": 8}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 999}


class Step(BaseModel):
    explanation: str = Field(max_length=12)
    output: str = Field(max_length=12)


class Solution(BaseModel):
    """OpenAI's example of a structured answer, with strings of limited length."""

    steps: list[Step] = Field(max_length=3)
    final_answer: str = Field(max_length=12)


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: dict[str, Any] = {
    "empty": _object(),
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "const": {"const": {"a": [1, "two", None]}},
    "enum of strings": {"enum": ["red", "green", 'blue "ish"', "größe", "日本"]},
    "enum of anything": {"enum": [1, "1", None, True, {"a": 1}, [2, 3], 2.5]},
    "integer range": {"type": "integer", "minimum": -17, "maximum": 123},
    "exclusive range": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 12},
    "number range": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 5},
    "short string": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "date": {"type": "string", "format": "date"},
    "date and time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "list": {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [_NAME, _COUNT], "items": False, "minItems": 2},
    "list of lists": {"type": "array", "maxItems": 2, "items": {"type": "array", "items": _COUNT, "maxItems": 2}},
    "person": _object(name=_NAME, age=_COUNT, active={"type": "boolean"}),
    "optional fields": _object(["id"], id=_COUNT, note=_NAME, tag={"enum": ["a", "b"]}),
    "nullable": _object(value={"type": ["string", "null"], "maxLength": 6}),
    "any of": _object(value={"anyOf": [_COUNT, _NAME, {"type": "null"}]}),
    "one of, by a tag": {
        "oneOf": [
            _object(kind={"const": "circle"}, radius=_COUNT),
            _object(kind={"const": "square"}, side=_COUNT),
        ]
    },
    "all of": {"allOf": [_object(["a"], a=_COUNT, b=_COUNT), {"type": "object", "required": ["b"]}]},
    "definitions": {
        "$defs": {"address": _object(street=_NAME, city=_NAME)},
        **_object(home={"$ref": "#/$defs/address"}, work={"$ref": "#/$defs/address"}),
    },
    "invoice": _object(
        number={"type": "string", "pattern": "^INV-[0-9]{3}$"},
        currency={"enum": ["EUR", "USD"]},
        lines={
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": _object(item=_NAME, quantity=_COUNT, paid={"type": "boolean"}),
        },
    ),
    "tool call": _object(
        name={"enum": ["get_weather", "search"]},
        arguments=_object(["city"], city=_NAME, unit={"enum": ["celsius", "fahrenheit"]}),
    ),
    "settings": _object(
        host={"type": "string", "pattern": "^[a-z]{1,8}$"},
        port={"type": "integer", "minimum": 1, "maximum": 65535},
        tls=_object(["enabled"], enabled={"type": "boolean"}, version={"enum": ["1.2", "1.3"]}),
    ),
    "map": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,3}$": _COUNT},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "pydantic": Solution.model_json_schema(),
}

DEEP: Any = {"type": "integer"}
for _ in range(40):
    DEEP = {"type": "array", "items": DEEP}

HOSTILE: dict[str, tuple[str, str]] = {
    "not JSON": ("json", '{"type": '),
    "no schema": ("json", "[1, 2]"),
    "no such type": ("json", '{"type": "str"}'),
    "no such keyword": ("json", '{"type": "array", "unevaluatedItems": {"type": "null"}}'),
    "a reference to nothing": ("json", '{"$ref": "#/$defs/missing"}'),
    "a reference to another host": ("json", '{"$ref": "http://127.0.0.1:1/schema.json"}'),
    "a reference to itself": ("json", '{"$ref": "#"}'),
    "a circle of references": (
        "json",
        '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
    ),
    "a pattern that is none": ("json", '{"type": "string", "pattern": "(["}'),
    "a look-ahead": ("json", '{"type": "string", "pattern": "^(?=a)(?!b).*$"}'),
    "an open bracket": ("regex", "(abc"),
    "a back reference": ("regex", r"(a+)\1"),
    "a hundred thousand brackets": ("regex", "(" * 60_000 + ")" * 60_000),
    "no rule": ("grammar", 'begin: "a"'),
    "no such rule": ("grammar", "start: other"),
    "ten thousand brackets in Lark": ("grammar", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "a rule that is itself": ("grammar", "start: start"),
    "a special token": ("grammar", 'start: <|im_start|> "a"'),
    "GBNF without its root": ("grammar", "other ::= [a-"),
}

ENDLESS: dict[str, tuple[str, str]] = {
    "an exponential regex": ("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    "a regex with a memory": ("regex", "(.*a.{400}|.*b.{390})c"),
    "a list without end": ("json", '{"type": "array", "items": {"type": "null"}, "minItems": 1000000}'),
    "a string without end": ("json", '{"type": "string", "minLength": 1000000}'),
}
"""Grammars that cost nothing until an answer follows them; an engine must bound their cost then."""
