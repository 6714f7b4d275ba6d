"""Check JSON texts beside a grammar and a validator."""

from __future__ import annotations

import sys

from llguidance import LLMatcher, LLTokenizer


def finite(number: str) -> float:
    """Return a number as a float, or the largest float if it would be infinite, which JSON cannot express."""
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


def lets_through(tokenizer: LLTokenizer, grammar: LLMatcher, text: str) -> bool:
    """Return whether a grammar allows a text, and the end of the answer after it."""
    matcher, tokens = grammar.deep_copy(), tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
