"""Grammars that hold an answer, in the form that llguidance takes, and limits of their cost.

The gateway has a grammar checked before it sends it to an engine, which compiles it again, with its own tokens.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

GrammarKind = Literal["json", "regex", "choice", "grammar", "lark"]

PARSER_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=100_000,  # the work for one mask: about 7 ms
    step_max_items=50_000,  # the work for one mask: about 3 ms
    max_lexer_states=20_000,  # one or two KB each
    max_grammar_size=200_000,
    verbose_errors=False,
)

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""The white space that is allowed between the parts of a JSON text.

Without a limit a model may write spaces until its tokens are used up.
"""

_SHOWN_CHARS = 500

_DATE = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Patterns in place of formats: the library's own know neither leap years nor that a minute has 60 seconds."""

_NEGATED_CLASS = re.compile(r"(\\.)|\[\^", re.DOTALL)
_HARDLY_WRITTEN = r"\x00-\x08\x0b\x0c\x0e-\x1f"
"""The control characters without tab and line ends: see `_held_pattern`."""

_WITH_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS_OF_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalProperties"})


class GrammarSource(msgspec.Struct, array_like=True, frozen=True):
    """A grammar as a client writes it.

    Attributes:
        text: For `json` a JSON schema, for `choice` a JSON list of strings, for `grammar` Lark or GBNF.
        whitespace: For `json`: a regular expression of the white space between two parts; empty for none.
        calls: Lark rules of which `calls` may stand in place of all that.
        tags: The texts that `calls`, or a `lark` grammar, names `tag_0`, `tag_1` and so on, each with the model's token
            that is this text, which is then the only way to spell it, or `None`.
    """

    kind: GrammarKind
    text: str
    whitespace: str | None = None
    calls: str | None = None
    tags: tuple[tuple[str, int | None], ...] = ()

    def with_token(self, token_id: int) -> GrammarSource:
        """Return the grammar with `token_id` in place of every token of the model."""
        tags = tuple((text, None if token is None else token_id) for text, token in self.tags)
        return msgspec.structs.replace(self, tags=tags)


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """The outcome of checking a grammar: the form that `new_matcher` takes, or the mistake in it."""

    grammar: str | None = None
    why: str = ""


def library_form(source: GrammarSource) -> str:
    """Return a grammar in the form that `new_matcher` takes.

    Raises:
        ValueError: The grammar is wrong, with a sentence for the client; `new_matcher` finds the other mistakes.
    """
    grammar = _grammar(source)
    if source.calls is None:
        return json.dumps({"grammars": [grammar]})
    either = {"lark_grammar": f"start: calls | @answer\n{source.calls}\n{_tag_rules(source)}"}
    return json.dumps({"grammars": [either, {**grammar, "name": "answer"}]})


def _grammar(source: GrammarSource) -> dict[str, object]:
    match source.kind:
        case "json":
            return {"json_schema": held_schema(json.loads(source.text), source.whitespace)}
        case "regex":
            [grammar] = json.loads(LLMatcher.grammar_from_regex(source.text))["grammars"]
            return dict(grammar)
        case "choice":
            alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(source.text))
            return {"lark_grammar": f"start: {alternatives}"}
        case "grammar":
            return {"lark_grammar": _as_lark(source.text)}
        case "lark":
            return {"lark_grammar": f"{source.text}\n{_tag_rules(source)}"}


def _tag_rules(source: GrammarSource) -> str:
    rules = (json.dumps(text) if token is None else f"<[{token}]>" for text, token in source.tags)
    return "\n".join(f"tag_{number}: {rule}" for number, rule in enumerate(rules))


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar. Other threads go on meanwhile.

    Raises:
        ValueError: The grammar is wrong or too large, with a sentence for the client.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=PARSER_LIMITS)
    if matcher.is_error():
        raise ValueError(error_of(matcher))
    return matcher


def error_of(matcher: LLMatcher) -> str:
    """Return why a matcher cannot go on, short enough for a client."""
    error = matcher.get_error().replace("<non-verbose/>", "").strip()
    return "no text matches it" if error == "NoExtensionBias" else error[:_SHOWN_CHARS]


def is_full(matcher: LLMatcher) -> bool:
    """Return whether a matcher failed because its automaton has as many states as it may have."""
    return "too many states" in matcher.get_error()


def _as_lark(text: str) -> str:
    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # noqa: BLE001 (a rule that is missing, or there twice, is a plain Exception)
        raise ValueError(f"it is neither Lark nor GBNF: {error}") from None
    return lark


def held_schema(schema: object, whitespace: str | None = None) -> dict[str, object]:
    """Return a JSON schema with the library's own settings added.

    Raises:
        ValueError: It is not a JSON schema.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object or true")
    is_compact = whitespace == ""
    options = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": whitespace or _WHITESPACE}
    return {**_with_patterns(schema), "x-guidance": options}


def _with_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which all patterns suit the library, and replace formats of which it knows less."""
    held: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _WITH_SCHEMAS and isinstance(value, dict):
            held[key] = {name: _part(part) for name, part in value.items()}
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            held[key] = [_part(part) for part in value]
        else:
            held[key] = _part(value) if key in _SCHEMAS else value
    if isinstance(pattern := held.get("pattern"), str):
        held["pattern"] = _held_pattern(pattern)
    if isinstance(keys := held.get("patternProperties"), dict):
        held["patternProperties"] = {_held_pattern(key): part for key, part in keys.items()}
    form = held.get("format")
    others = held.get("allOf", [])
    if isinstance(form, str) and form in _PATTERNS and isinstance(others, list):
        del held["format"]
        held["allOf"] = [*others, {"pattern": _PATTERNS[form]}]
    return held


def _held_pattern(pattern: str) -> str:
    """Return a pattern whose negated classes exclude control characters.

    For a class with nearly all of them the library allows every escape in a JSON string, and so `\\"` for `[^"]`.
    """
    return _NEGATED_CLASS.sub(lambda match: match[1] or f"[^{_HARDLY_WRITTEN}", pattern)


def _part(schema: Any) -> Any:
    return _with_patterns(schema) if isinstance(schema, dict) else schema
