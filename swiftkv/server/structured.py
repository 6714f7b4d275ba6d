"""The fields that ask for a grammar: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from swiftkv.grammars import GrammarKind, GrammarSource
from swiftkv.server.errors import ApiError
from swiftkv.server.fields import Body, Label, Text, Unsupported
from swiftkv.server.grammars import AskedGrammar
from swiftkv.server.price import LIMITS, check_grammar

JsonSchema = dict[str, Any] | bool
Choices = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=LIMITS.grammar_choices)]


class JsonSchemaFormat(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Label | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema", description="Default: any JSON object")] = None
    strict: bool | None = Field(None, description="The schema constrains the answer in either case")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's form, with one of the first five fields."""

    json_: Annotated[JsonSchema | Text | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = Field(None, description="Lark or GBNF")
    whitespace_pattern: Label | None = Field(
        None, description="A regular expression for the whitespace of `json` and `json_object`"
    )
    disable_any_whitespace: bool | None = None
    disable_fallback: Annotated[None, Unsupported(False, True)] = None
    disable_additional_properties: Annotated[None, Unsupported(False)] = None
    structural_tag: Annotated[None, Unsupported()] = None


class StructuredFields(Body):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | Text | None = Field(None, description="As `structured_outputs.json`")
    guided_regex: Text | None = Field(None, description="As `structured_outputs.regex`")
    guided_choice: Choices | None = Field(None, description="As `structured_outputs.choice`")
    guided_grammar: Text | None = Field(None, description="As `structured_outputs.grammar`")
    guided_whitespace_pattern: Label | None = Field(None, description="As `structured_outputs.whitespace_pattern`")
    guided_decoding_backend: Label | None = Field(None, description="Accepted, not used")


def asks_for_grammar(body: StructuredFields) -> bool:
    """Return whether `asked_grammar` may find one; only then is it worth a thread."""
    return any(getattr(body, name) is not None for name in StructuredFields.model_fields)


def asked_grammar(body: StructuredFields) -> AskedGrammar | None:
    """Return the grammar that a request asks for. A large one takes milliseconds.

    Raises:
        ApiError: 400 if there are several different ones, or one is not JSON or larger than the limits.
    """
    found = [*_of_response_format(body), *_of_structured_outputs(body), *_of_guided(body)]
    if not found:
        return None
    # Clients of vLLM's older and newer versions (guidance's) give one grammar twice, under both names.
    first, others = found[0], [asked for asked in found if asked.source != found[0].source]
    if others:
        fields = " and ".join(f"'{asked.field}'" for asked in [first, *others])
        raise ApiError(400, f"fields {fields} cannot constrain one answer together: give one", param=others[0].field)
    return first


def _of_response_format(body: StructuredFields) -> Iterator[AskedGrammar]:
    wanted = body.response_format
    if wanted is None:
        return
    if wanted.json_schema is not None and wanted.type != "json_schema":
        raise _without("response_format.json_schema", "'type': 'json_schema'")
    if wanted.type == "text":
        return
    if wanted.type == "json_object":
        yield _json("response_format", {"type": "object"})
        return
    if wanted.json_schema is None:
        field = "response_format.json_schema"
        raise ApiError(400, f"field '{field}' is required", param=field, code="missing_field")
    schema = wanted.json_schema.schema_
    yield _json("response_format.json_schema.schema", {"type": "object"} if schema is None else schema)


def _of_structured_outputs(body: StructuredFields) -> Iterator[AskedGrammar]:
    wanted = body.structured_outputs
    if wanted is None:
        return
    if wanted.disable_any_whitespace and wanted.whitespace_pattern is not None:
        field = "structured_outputs.whitespace_pattern"
        raise ApiError(400, f"field '{field}' excludes 'disable_any_whitespace': give one", param=field)
    whitespace = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    if whitespace is not None and wanted.json_ is None and not wanted.json_object:
        name = "disable_any_whitespace" if wanted.disable_any_whitespace else "whitespace_pattern"
        raise _without(f"structured_outputs.{name}", "'json' or 'json_object'")
    if wanted.json_ is not None:
        yield _json("structured_outputs.json", wanted.json_, whitespace)
    if wanted.json_object:
        yield _json("structured_outputs.json_object", {"type": "object"}, whitespace)
    yield from _of_texts("structured_outputs.", wanted.regex, wanted.choice, wanted.grammar)


def _of_guided(body: StructuredFields) -> Iterator[AskedGrammar]:
    if body.guided_json is not None:
        yield _json("guided_json", body.guided_json, body.guided_whitespace_pattern)
    elif body.guided_whitespace_pattern is not None:
        raise _without("guided_whitespace_pattern", "'guided_json'")
    yield from _of_texts("guided_", body.guided_regex, body.guided_choice, body.guided_grammar)


def _of_texts(prefix: str, regex: str | None, choice: list[str] | None, grammar: str | None) -> Iterator[AskedGrammar]:
    if regex is not None:
        yield _asked(f"{prefix}regex", "regex", regex)
    if choice is not None:
        yield _asked(f"{prefix}choice", "choice", encoded(choice, f"{prefix}choice"))
    if grammar is not None:
        yield _asked(f"{prefix}grammar", "grammar", grammar)


def _without(field: str, other: str) -> ApiError:
    """Return the error for a field that does nothing without another one."""
    return ApiError(400, f"field '{field}' has no effect without {other}", param=field)


def _json(field: str, schema: JsonSchema | str, whitespace: str | None = None) -> AskedGrammar:
    if isinstance(schema, str):
        try:
            msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ApiError(400, f"field '{field}' is not valid JSON: {error}", param=field) from None
        return _asked(field, "json", schema, whitespace)
    return _asked(field, "json", encoded(schema, field), whitespace)


def encoded(value: object, field: str) -> str:
    """Return a value that a client sent, as JSON.

    Raises:
        ApiError: 400 that names `field` if it cannot be encoded.
    """
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, UnicodeEncodeError):
        raise ApiError(400, f"field '{field}' is nested too deeply, or has a lone surrogate", param=field) from None


def _asked(field: str, kind: GrammarKind, text: str, whitespace: str | None = None) -> AskedGrammar:
    check_grammar(field, text, is_json=kind in ("json", "choice"))
    return AskedGrammar(field, GrammarSource(kind, text, whitespace))
