"""The types of a function's arguments, for models that write these as plain text: the schema has their types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

_MAX_REFERENCES = 16  # from one schema to the next
_DEFINITIONS = ("$defs", "definitions")
_NULLS = ("null", "none")  # the second is Python's


@dataclass(frozen=True, slots=True)
class Argument:
    """One parameter of a function.

    Attributes:
        kind: The first type of its schema that is not null; `string` if there is none, as in vLLM.
        schema: The part of its schema that is of this kind, with the definitions that it may refer to.
        whole: All of its schema, with these definitions.
    """

    kind: str
    is_nullable: bool
    is_required: bool
    schema: Mapping[str, Any]
    whole: Mapping[str, Any]

    @property
    def choices(self) -> list[str]:
        """The only texts that it may be, if its schema lists any."""
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum", [])
        return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def arguments_of(parameters: Mapping[str, Any]) -> dict[str, Argument]:
    """Return the parameters of a function's schema, by name."""
    properties = parameters.get("properties")
    required = parameters.get("required")
    if not isinstance(properties, dict):
        return {}
    required = required if isinstance(required, list) else []
    return {name: argument_of(schema, parameters, is_required=name in required) for name, schema in properties.items()}


def argument_of(schema: object, root: Mapping[str, Any], *, is_required: bool = True) -> Argument:
    """Return the value that `schema` describes, which is a part of the schema `root`."""
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    kinds = list(_kinds(schema, root))
    kind, found = next(((kind, found) for kind, found in kinds if kind != "null"), ("string", {}))
    is_nullable = any(kind == "null" for kind, _ in kinds)
    whole = schema if isinstance(schema, dict) else {}
    return Argument(kind, is_nullable, is_required, {**definitions, **found}, {**definitions, **whole})


def argument_json(text: str, argument: Argument | None) -> str:
    """Return an argument's text as JSON of the type that it should have, or as a string if it is not of that type."""
    is_null = text.strip().lower() in _NULLS
    if argument is not None and is_null and (argument.is_nullable or argument.kind != "string"):
        return "null"
    if argument is None or argument.kind == "string":
        return json.dumps(text, ensure_ascii=False)
    if argument.kind == "boolean" and text.strip().lower() in ("true", "false"):
        return text.strip().lower()
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def argument_rules(name: str, arguments: Mapping[str, Argument], *, assign: str, between: str) -> list[str]:
    """Return Lark rules in which `first_{name}_0` is arguments in this order: all that are required, and any others.

    An argument is its key, `assign` and the rule `value_{name}_{index}`; `between` stands between two.
    """
    rules = []
    for index, (key, argument) in enumerate(arguments.items()):
        this, later = f"{name}_{index}", f"{name}_{index + 1}"
        rules += [
            f"argument_{this}: {json.dumps(key + assign)} value_{this}",
            f"first_{this}: argument_{this} rest_{later}" + ("" if argument.is_required else f" | first_{later}"),
            f"rest_{this}: {json.dumps(between)} argument_{this} rest_{later}"
            + ("" if argument.is_required else f" | rest_{later}"),
        ]
    end = f"{name}_{len(arguments)}"
    return [*rules, f'first_{end}: ""', f'rest_{end}: ""']


def _kinds(schema: object, root: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the types that a schema allows, and the part of it that says so."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield from _kinds(_referred(reference, root), root, depth + 1)
    for options in (schema.get("anyOf"), schema.get("oneOf")):
        for option in options if isinstance(options, list) else []:
            yield from _kinds(option, root, depth + 1)
    types = schema.get("type")
    for kind in types if isinstance(types, list) else [types]:
        if isinstance(kind, str):
            yield kind, schema
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if types is None and isinstance(values, list):
        for value in values:
            yield "string" if isinstance(value, str) else "null" if value is None else "any", schema


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    found: object = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return found
