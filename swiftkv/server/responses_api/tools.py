"""The tools of a request to `/v1/responses`, and the functions that the model knows them as."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, Tag

from swiftkv.server.fields import NO_SERVER_TOOLS, Body, Text, told_by
from swiftkv.server.price import LIMITS
from swiftkv.server.tools import FunctionDefinition, FunctionName, Tool, read_arguments

_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input of the tool"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of the function that stands for a custom tool."""

HostedType = Literal[
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "image_generation",
    "tool_search",
]
"""Tools that OpenAI's servers run, and that Codex offers with every request."""


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool as the client names it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema")
    strict: bool | None = Field(None, description="Accepted, not used")
    defer_loading: bool | None = Field(None, description="Accepted, not used")

    def for_chat(self, namespace: str | None = None) -> Tool:
        return _function(function_name(namespace, self.name), self.description, self.parameters, strict=self.strict)


class PlainInput(Body):
    type: Literal["text"]


class GrammarInput(Body):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Text


class CustomTool(Body):
    """A tool whose input is a text of its own form."""

    type: Literal["custom"]
    name: FunctionName
    description: Text | None = None
    format: (
        Annotated[
            Annotated[PlainInput, Tag("plain input")] | Annotated[GrammarInput, Tag("input with a grammar")],
            told_by("type", {"text": "plain input", "grammar": "input with a grammar"}),
        ]
        | None
    ) = Field(None, description="A grammar is shown to the model, but does not constrain the input")
    defer_loading: bool | None = Field(None, description="Accepted, not used")

    def for_chat(self, namespace: str | None = None) -> Tool:
        description = self.description or ""
        if isinstance(self.format, GrammarInput):
            description += f"\n\nIts input follows this grammar ({self.format.syntax}):\n{self.format.definition}"
        return _function(function_name(namespace, self.name), description.strip() or None, _INPUT)


_KINDS = {"function": "function tool", "custom": "custom tool"}
InnerTool = Annotated[
    Annotated[FunctionTool, Tag("function tool")] | Annotated[CustomTool, Tag("custom tool")],
    told_by("type", _KINDS),
]


class NamespaceTool(Body):
    """Tools of one origin, such as an MCP server of the client's."""

    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = Field(None, description="Accepted, not used")
    tools: Annotated[list[InnerTool], Field(fail_fast=True, max_length=LIMITS.tools)]


class HostedTool(Body):
    """A tool that the server would have to run: this one runs none, so the model does not see it."""

    model_config = ConfigDict(extra="ignore")

    type: HostedType


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function tool")]
    | Annotated[CustomTool, Tag("custom tool")]
    | Annotated[NamespaceTool, Tag("namespace of tools")]
    | Annotated[HostedTool, Tag("hosted tool")],
    told_by(
        "type",
        {**_KINDS, "namespace": "namespace of tools", **dict.fromkeys(get_args(HostedType), "hosted tool")},
        because=NO_SERVER_TOOLS,
    ),
]
AnyTools = Annotated[list[AnyTool], Field(fail_fast=True, max_length=LIMITS.tools)]


class NamedToolChoice(Body):
    type: Literal["function", "custom"]
    name: FunctionName
    namespace: FunctionName | None = None


class RequestTools:
    """The tools of one request."""

    def __init__(self, asked: Sequence[FunctionTool | CustomTool | NamespaceTool | HostedTool]) -> None:
        self.shown = [tool for tool in asked if not isinstance(tool, HostedTool)]
        self._by_function: Mapping[str, CalledTool] = {
            function_name(space, tool.name): CalledTool(tool.name, space, isinstance(tool, CustomTool))
            for space, tool in self._each()
        }

    def for_chat(self) -> list[Tool]:
        """Return the functions that the model may call."""
        return [tool.for_chat(space) for space, tool in self._each()]

    def called(self, function: str) -> CalledTool:
        """Return the tool that a function stands for."""
        return self._by_function.get(function) or CalledTool(function)

    def _each(self) -> Iterator[tuple[str | None, FunctionTool | CustomTool]]:
        for tool in self.shown:
            if isinstance(tool, NamespaceTool):
                yield from ((tool.name, inner) for inner in tool.tools)
            else:
                yield None, tool


def function_name(namespace: str | None, name: str) -> str:
    """Return the name that the model knows a tool by."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool whose input is `text`."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool; arguments that are cut or wrong are shown as they are."""
    text = (read_arguments(arguments) or {}).get("input")
    return text if isinstance(text, str) else arguments


def _function(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None = None
) -> Tool:
    function = FunctionDefinition.model_construct(
        name=name, description=description, parameters=parameters, strict=strict
    )
    return Tool.model_construct(type="function", function=function)
