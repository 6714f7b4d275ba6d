"""Markdown tables of the fields that the routes take, made from the types that check them.

python -m swiftkv.server.field_tables docs/api.md     # writes them anew between the file's markers
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from swiftkv.server.fields import INT32_MAX, Body, Unsupported
from swiftkv.server.messages_api.body import (
    AnsweredMessage,
    ClientTool,
    CountTokensBody,
    FileParam,
    MessagesBody,
    NamedToolChoice,
    OutputConfig,
    SystemMessage,
    TextBlockParam,
    ThinkingParam,
    ThinkingSettings,
    ToolChangeParam,
    ToolReferenceParam,
    ToolResultParam,
    ToolUseParam,
    UserMessage,
)
from swiftkv.server.pooling.bodies import (
    DocumentText,
    EmbeddingBody,
    PooledBody,
    RerankBody,
    ScoreBody,
)
from swiftkv.server.protocol import (
    BatchBody,
    BudgetBody,
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    PinBody,
    Prediction,
    SamplingFields,
    StreamOptions,
    TextPart,
    TokenizeBody,
)
from swiftkv.server.responses_api.body import (
    CallOutput,
    CustomCallInput,
    FunctionCallInput,
    InputText,
    MessageItem,
    ReasoningItem,
    ReasoningSettings,
    ResponsesBody,
    SchemaTextFormat,
    TextSettings,
)
from swiftkv.server.responses_api.tools import CustomTool, FunctionTool, HostedTool, NamespaceTool
from swiftkv.server.structured import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from swiftkv.server.tools import FunctionDefinition, Tool, ToolCallMessage

BEGIN, END = "<!-- fields: begin -->\n", "<!-- fields: end -->\n"
_NOT_USED = "Accepted, not used"
_SECTIONS: tuple[tuple[str, type[Body], *tuple[type[Body], ...]], ...] = (
    ("Every request for an answer", SamplingFields),
    ("Both kinds of completions: further fields", GenerationBody, SamplingFields),
    ("`POST /v1/completions`: further fields", CompletionBody, GenerationBody),
    ("`POST /v1/chat/completions`: further fields", ChatBody, GenerationBody),
    ("A message", ChatMessage),
    ("A part of a message's `content`", TextPart),
    ("`prediction`", Prediction),
    ("`stream_options`", StreamOptions),
    ("A tool", Tool),
    ("A tool's `function`", FunctionDefinition),
    ("A call in an assistant's message", ToolCallMessage),
    ("`response_format`", ResponseFormat),
    ("`response_format.json_schema`", JsonSchemaFormat),
    ("`structured_outputs`", StructuredOutputs),
    ("`POST /v1/responses`: further fields", ResponsesBody, SamplingFields),
    ("An item of `input`: a message", MessageItem),
    ("An item of `input`: a call", FunctionCallInput),
    ("An item of `input`: a call of a custom tool", CustomCallInput),
    ("An item of `input`: the output of a call", CallOutput),
    ("An item of `input`: reasoning", ReasoningItem),
    ("A part of an item's `content` or `output`", InputText),
    ("A tool of `/v1/responses`: a function", FunctionTool),
    ("A tool of `/v1/responses`: a custom one", CustomTool),
    ("A tool of `/v1/responses`: a namespace of tools", NamespaceTool),
    ("A tool of `/v1/responses` that is left out", HostedTool),
    ("`text`", TextSettings),
    ("`text.format` with a schema", SchemaTextFormat),
    ("`reasoning`", ReasoningSettings),
    ("`POST /v1/messages/count_tokens`", CountTokensBody),
    ("`POST /v1/messages`: further fields", MessagesBody, CountTokensBody, SamplingFields),
    ("A message of the user", UserMessage),
    ("A message of the assistant", AnsweredMessage),
    ("A system message between those of the user and the assistant", SystemMessage),
    ("A content block: text", TextBlockParam),
    ("A content block: a call", ToolUseParam),
    ("A content block: the result of a call", ToolResultParam),
    ("A part of the result of a call: a picture or document", FileParam),
    ("A part of the result of a call: a tool that was found", ToolReferenceParam),
    ("A content block: thinking", ThinkingParam),
    ("A content block of a system message: a tool that comes or goes", ToolChangeParam),
    ("A tool of `/v1/messages`", ClientTool),
    ("`tool_choice` of `/v1/messages`, by name", NamedToolChoice),
    ("`output_config`", OutputConfig),
    ("`thinking`", ThinkingSettings),
    ("Every request for embeddings or scores", PooledBody),
    ("`POST /v1/embeddings`: further fields", EmbeddingBody, PooledBody),
    ("`POST /v1/score`: further fields", ScoreBody, PooledBody),
    ("`POST /v1/rerank`: further fields", RerankBody, PooledBody),
    ("A document of `/v1/rerank`", DocumentText),
    ("`POST /tokenize`", TokenizeBody),
    ("`POST /detokenize`", DetokenizeBody),
    ("`POST /v1/batches`", BatchBody),
    ("`PATCH /admin/lending/{worker}`", BudgetBody),
    ("`POST /admin/cache/{model}/pin`", PinBody),
)
"""The heading of each section, its body, and the bodies whose fields other sections list."""


def field_tables() -> str:
    """Return a table for each body: its fields in the order of the code, and whether each does something."""
    return "\n".join(_section(*section) for section in _SECTIONS)


def _section(heading: str, body: type[Body], *bases: type[Body]) -> str:
    known = {name for base in bases for name in base.model_fields}
    schema = body.model_json_schema()
    rows = [
        f"| `{name}` | {_state(field)} | {_values(schema['properties'][name], schema.get('$defs', {}))} |"
        for name, field in ((field.alias or name, field) for name, field in body.model_fields.items())
        if name not in known
    ]
    return "\n".join([f"### {heading}", "", "| field | | values |", "| --- | --- | --- |", *rows, ""])


def _state(field: FieldInfo) -> str:
    if any(isinstance(item, Unsupported) for item in field.metadata):
        return "refused"
    if field.description == _NOT_USED:
        return "accepted without effect"
    return "required" if field.is_required() else "supported"


def _values(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    """Describe the values of a field without `null`, which always means that the field was left out."""
    kinds = [kind for kind in schema.get("anyOf") or schema.get("oneOf") or [schema] if kind.get("type") != "null"]
    if "enum" in schema and schema.get("description") == "Not supported":
        harmless = [f"`{json.dumps(value)}`" for value in schema["enum"] if value is not None]
        return "only " + " or ".join(harmless) if harmless else ""
    text = "; or ".join(dict.fromkeys(_kind(kind, defs) for kind in kinds))
    note = schema.get("description", "")
    return f"{text}. {note}" if note and note != _NOT_USED else text


def _kind(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return {"ChatMessage": "a message", "TextPart": "a part"}.get(name, "see below")
    if "oneOf" in schema:
        return _values(schema, defs)
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case None:
            return "anything"
        case "array":
            most = f"a list, up to {schema['maxItems']:,}, of: " if "maxItems" in schema else "a list of: "
            return most + _values(schema["items"], defs)
        case "integer" | "number":
            return " ".join([f"{_article(schema['type'])}", *_bounds(schema)])
        case "boolean":
            return "true or false"
        case "object":
            return f"up to {schema['maxProperties']:,} entries" if "maxProperties" in schema else "an object"
        case _:
            most = schema.get("maxLength", 0)
            return f"text, up to {most:,} characters" if 0 < most < 1 << 24 else "text"


def _article(kind: str) -> str:
    return "an integer" if kind == "integer" else "a number"


def _bounds(schema: dict[str, Any]) -> Iterator[str]:
    if schema.get("minimum", -INT32_MAX) > -INT32_MAX:
        yield f"from {schema['minimum']:,}"
    if "exclusiveMinimum" in schema:
        yield f"above {schema['exclusiveMinimum']:,}"
    if schema.get("maximum", INT32_MAX) < INT32_MAX:
        yield f"to {schema['maximum']:,}"


def with_tables(document: str) -> str:
    """Return a document with its tables written anew. Raises `ValueError` if it lacks one of the markers."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the document lacks {BEGIN.strip()} or {END.strip()}")
    return f"{head}{begin}\n{field_tables()}\n{end}{tail}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text()))
