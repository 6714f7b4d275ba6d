"""Tools in a chat: the fields of a request, and their effects on prompt, grammar and answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from swiftkv.grammars import GrammarSource
from swiftkv.server.errors import ApiError
from swiftkv.server.fields import Body, CacheControl, Label, Text
from swiftkv.server.grammars import AskedGrammar
from swiftkv.server.price import LIMITS, check_grammar
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers import TOOL_PARSERS
from swiftkv.server.tool_parsers.base import EitherParser, ToolFunction, ToolParser

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class FunctionDefinition(Body):
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema")
    strict: bool | None = Field(None, description="Accepted, not used")

    def for_template(self) -> dict[str, Any]:
        """Return the function as chat templates expect it: many fail without a description or parameters."""
        without = {"name": self.name, "description": "", "parameters": {"type": "object", "properties": {}}}
        return without | self.model_dump(exclude_none=True)


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl = None


class NamedFunction(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    name: FunctionName
    arguments: Text
    parsed_arguments: Any = Field(None, description="Accepted, not used")  # by OpenAI's client, as a message's `parsed`


class ToolCallMessage(Body):
    """A call that an assistant's earlier message made."""

    id: Label
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None
    provider_specific_fields: Any = Field(None, description="Accepted, not used")  # LiteLLM's

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it: arguments are an object.

        The arguments of an earlier answer may be cut off or malformed. They come back with the conversation, which must
        go on, so the model sees them as one text.
        """
        text = self.function.arguments
        arguments = read_arguments(text) if text else {}
        if arguments is None:
            arguments = {"arguments": text}
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call, or `None` if they are not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=LIMITS.tools)]
ToolCallMessages = Annotated[list[ToolCallMessage], Field(fail_fast=True, max_length=LIMITS.tools)]


class ToolFields(Body):
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that one answer may call.

    Attributes:
        must_call: Whether the answer is calls and nothing else.
        is_named: Whether the request names the function.
        several: Whether there may be more than one call.
        is_held: Whether a grammar constrains the answer to calls, or to something else that the request asks for.
    """

    parser: type[ToolParser]
    functions: Sequence[ToolFunction]
    must_call: bool
    is_named: bool
    several: bool
    is_held: bool = False

    def new_parser(self) -> ToolParser | EitherParser:
        parser, opening = self.parser(self.functions, must_call=self.must_call), self.parser.call_opening
        if self.must_call or not self.is_held or opening is None:
            return parser
        return EitherParser(parser, opening)

    def grammar(self, tokenizer: Tokenizer) -> AskedGrammar:
        """Return the grammar that forces the answer to be calls. `tokenizer` is the model's.

        Raises:
            ApiError: 400 if it is larger than the limits.
        """
        return _only_calls(self._rules(), self._tags(tokenizer))

    def grammars_beside(self, asked: AskedGrammar, tokenizer: Tokenizer) -> list[AskedGrammar]:
        """Return the grammars to check where the model may choose between calls and `asked`; the last is the answer's.

        `tokenizer` is the model's.

        Raises:
            ApiError: 400 if they are larger than the limits, or the model's calls may look like other answers.
        """
        if not self.parser.holds_calls:
            return [asked]  # calls come before the answer, and `asked` does not constrain them
        if self.parser.call_opening is None:
            name = next(name for name, parser in TOOL_PARSERS.items() if parser is self.parser)
            message = (
                f"field 'tool_choice': auto cannot be used with field '{asked.field}': a grammar cannot tell this "
                f"model's calls (tool_parser: {name}) from other answers; send required, a function or none"
            )
            raise ApiError(400, message, param="tool_choice", code="unsupported_field")
        rules, tags = self._rules(), self._tags(tokenizer)
        either = msgspec.structs.replace(asked.source, calls=rules, tags=tags)
        return [_only_calls(rules, tags), AskedGrammar(asked.field, either)]  # so a mistake in the tools names them

    def _tags(self, tokenizer: Tokenizer) -> tuple[tuple[str, int | None], ...]:
        return tuple((tag, tokenizer.token_id(tag)) for tag in self.parser.call_tags)

    def _rules(self) -> str:
        rules = self.parser.call_grammar(self.functions, several=self.several)
        check_grammar("tools", rules, is_json=False)
        return rules


def _only_calls(rules: str, tags: tuple[tuple[str, int | None], ...]) -> AskedGrammar:
    return AskedGrammar("tools", GrammarSource("lark", f"start: calls\n{rules}", tags=tags))


def tool_use(parser: type[ToolParser] | None, body: ToolFields, *, is_held: bool = False) -> ToolUse | None:
    """Return the tools that the answer to a request may call; `None` if it may call none.

    Args:
        parser: The parser of the model's calls; `None`: it is not known how the model writes them.
        is_held: Whether a grammar constrains the answer.

    Raises:
        ApiError: 400.
    """
    choice = body.tool_choice or "auto"
    if not body.tools:
        if choice not in ("none", "auto"):
            raise ApiError(400, "field 'tool_choice' asks for a call, but field 'tools' is empty", param="tool_choice")
        return None
    if choice == "none":
        return None
    if parser is None:
        message = (
            "field 'tools': it is not known how this model writes calls, or its chat template takes no tools; set "
            "models[].tool_parser, or send tool_choice: none"
        )
        raise ApiError(400, message, param="tools")
    if choice not in ("auto", "none") and not parser.holds_calls:
        message = "field 'tool_choice': this model cannot be made to call a tool; leave it out, or send auto or none"
        raise ApiError(400, message, param="tool_choice", code="unsupported_field")
    functions = [ToolFunction(tool.function.name, tool.function.parameters or {}) for tool in body.tools]
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
        if not functions:
            message = f"field 'tool_choice': there is no function '{choice.function.name}' in field 'tools'"
            raise ApiError(400, message, param="tool_choice")
    is_named = isinstance(choice, NamedTool)
    return ToolUse(
        parser,
        functions,
        must_call=is_named or choice == "required",
        is_named=is_named,
        several=not is_named and body.parallel_tool_calls is not False,
        is_held=is_held,
    )


def template_tools(body: ToolFields) -> list[dict[str, Any]] | None:
    """Return the tools as chat templates expect them, or `None` where the answer may call nothing."""
    if not body.tools or body.tool_choice == "none":
        return None
    return [{"type": tool.type, "function": tool.function.for_template()} for tool in body.tools]
