"""Grammars of JSON schemas beside the JSON Schema organisation's own test suite.

What a grammar lets through must be valid. A schema may be refused, and so may an instance that is valid (its properties
may stand in another order than the schema's): neither is a wrong answer. Of host names, the length of the whole and
what `xn--` encodes are not held.

The suite is https://github.com/json-schema-org/JSON-Schema-Test-Suite at 44401e0, draft 2020-12 without what names
other documents, and the formats that `docs/structured-output.md` names. Its licence lies beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from swiftkv.grammars import GrammarSource, library_form, new_matcher
from tests.support.json_answers import finite, lets_through

SUITE: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "support/json_schema_suite.json").read_text()
)
"""Groups of a schema and instances, by keyword."""
REFUSED = {
    "contains", "defs", "dependentRequired", "dependentSchemas", "if-then-else", "maxContains", "minContains", "not",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
}  # fmt: skip
"""The keywords that no grammar holds. The suite's `defs` are about a schema of schemas, with dynamic references."""
ANSWERS = 3
MAX_TOKENS = 200


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    """Each byte is a token, so that a grammar is followed character by character."""
    return LLTokenizer("byte")


def compiled(tokenizer: LLTokenizer, schema: Any) -> LLMatcher | None:
    """Return the schema's grammar; `None` if it is refused."""
    try:
        return new_matcher(tokenizer, library_form(GrammarSource("json", json.dumps(schema))))
    except ValueError:
        return None


def answers(tokenizer: LLTokenizer, grammar: LLMatcher, rng: np.random.Generator) -> Iterator[str]:
    """Yield what a model that draws at random answers, where it ends in time."""
    bits = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    for _ in range(ANSWERS):
        matcher, tokens = grammar.deep_copy(), list[int]()
        while len(tokens) < MAX_TOKENS:
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if matcher.is_error():  # it allows nothing, or is too costly to follow
                break
            mask = np.unpackbits(bits.view(np.uint8), count=tokenizer.vocab_size, bitorder="little")
            token = int(rng.choice(np.flatnonzero(mask)))
            if token == tokenizer.eos_token:
                yield bytes(tokens).decode()
                break
            assert matcher.consume_token(token)
            tokens.append(token)


@pytest.mark.parametrize("keyword", SUITE)
def test_what_is_invalid_is_never_let_through(keyword: str, tokenizer: LLTokenizer) -> None:
    wrong = []
    for group in SUITE[keyword]:
        if (grammar := compiled(tokenizer, group["schema"])) is None:
            continue
        for test in group["tests"]:
            # Spaces are where models write them; the library follows JSON without any as well.
            text = json.dumps(test["data"], ensure_ascii=False)
            is_known = keyword == "format hostname" and (len(text) > 255 or "xn--" in text.lower())
            if not test["valid"] and not is_known and lets_through(tokenizer, grammar, text):
                wrong.append((group["description"], test["description"], text))
    assert wrong == []


@pytest.mark.parametrize("keyword", SUITE)
def test_whatever_is_drawn_is_valid(keyword: str, tokenizer: LLTokenizer) -> None:
    rng = np.random.default_rng(0)
    wrong = []
    for group in SUITE[keyword]:
        if (grammar := compiled(tokenizer, group["schema"])) is None:
            continue
        validator = jsonschema_rs.Draft202012Validator(group["schema"], validate_formats=True)
        drawn = answers(tokenizer, grammar, rng)
        wrong += [
            (group["description"], text)
            for text in drawn
            if not validator.is_valid(json.loads(text, parse_float=finite))
        ]
    assert wrong == []


@pytest.mark.parametrize(
    ("pattern", "wrong", "right"),
    [
        ('^[^"]+$', 'a"b', "a\\b\n\té"),
        (r'^\[[^,"]+$', '["', "[\\"),
        (r"^[^\\]+$", "a\\", 'a"b'),
        (r"^[^\n\"]+$", 'a"', "a\\"),
    ],
)
@pytest.mark.parametrize("is_key", [False, True])
def test_a_negated_class_lets_no_escaped_character_through(
    pattern: str, wrong: str, right: str, is_key: bool, tokenizer: LLTokenizer
) -> None:
    schema = {"type": "string", "pattern": pattern}
    if is_key:
        schema = {"type": "object", "patternProperties": {pattern: True}, "additionalProperties": False}
    grammar = compiled(tokenizer, schema)
    assert grammar is not None
    for text, is_right in ((wrong, False), (right, True)):
        instance = json.dumps({text: 1} if is_key else text, ensure_ascii=False)
        assert lets_through(tokenizer, grammar, instance) == is_right


def test_most_of_what_the_document_names_is_followed(tokenizer: LLTokenizer) -> None:
    """A grammar that was refused would pass the tests above."""
    followed = {
        keyword: sum(compiled(tokenizer, group["schema"]) is not None for group in groups) / len(groups)
        for keyword, groups in SUITE.items()
    }
    assert {keyword for keyword, part in followed.items() if part == 0} == REFUSED
    assert [keyword for keyword, part in followed.items() if 0 < part < 0.5] == ["oneOf"]
