"""The process that checks grammars for the gateway: `python -m swiftkv.server.grammar_child`.

A grammar can be made to exhaust a compiler's stack, memory or time. Here that ends only this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec
from llguidance import LLTokenizer

from swiftkv.grammars import GrammarSource, Verdict, error_of, library_form, new_matcher
from swiftkv.server.child import ChildLimits, serve

_ANY_TOKEN = 0  # stands for a token of the model, which is not known here
# An engine compiles with four times the stack.
_LIMITS = ChildLimits(memory_bytes=2 << 30, stack_bytes=4 << 20, cpu_s=2)


def begin() -> Callable[[bytes], bytes]:
    """Return the function that checks a `GrammarSource`; it takes one as MessagePack and returns a `Verdict`."""
    tokenizer = LLTokenizer("byte")
    decoder = msgspec.msgpack.Decoder(GrammarSource)
    return lambda message: msgspec.msgpack.encode(check(decoder.decode(message), tokenizer))


def check(source: GrammarSource, tokenizer: LLTokenizer) -> Verdict:
    """Compile a grammar and take its first step."""
    try:
        grammar = library_form(source)
        matcher = new_matcher(tokenizer, library_form(source.with_token(_ANY_TOKEN)))
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(error_of(matcher))
    except (ValueError, RecursionError) as error:
        return Verdict(why=str(error))
    return Verdict(grammar)


if __name__ == "__main__":
    sys.exit(serve(begin, _LIMITS))
