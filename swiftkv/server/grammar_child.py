"""The process in which the gateway has grammars checked: `python -m swiftkv.server.grammar_child`.

A grammar can be made to take a compiler's stack, memory or time. Here that ends this process and nothing else.
"""

from __future__ import annotations

import os
import resource
import sys

import msgspec
from llguidance import LLTokenizer

from swiftkv.grammars import GrammarSource, Verdict, error_of, library_form, new_matcher
from swiftkv.processes import die_with_parent
from swiftkv.server.grammars import CHECK_CPU_S, HEADER_BYTES

_MEMORY_BYTES = 2 << 30
_STACK_BYTES = 4 << 20  # an engine compiles with four times as much
_NICENESS = 5


def main() -> int:
    """Answer each `GrammarSource` on standard input with a `Verdict`, until the input ends."""
    if not die_with_parent():
        return 0
    os.nice(_NICENESS)
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_STACK, _STACK_BYTES),
    ):
        _lower(kind, limit)
    tokenizer = LLTokenizer("byte")
    decoder = msgspec.msgpack.Decoder(GrammarSource)
    while header := sys.stdin.buffer.read(HEADER_BYTES):
        source = decoder.decode(sys.stdin.buffer.read(int.from_bytes(header, "little")))
        _lower(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + 1 + CHECK_CPU_S)
        answer = msgspec.msgpack.encode(check(source, tokenizer))
        _write_all(answers, len(answer).to_bytes(HEADER_BYTES, "little") + answer)
    return 0


def check(source: GrammarSource, tokenizer: LLTokenizer) -> Verdict:
    """Compile a grammar and take its first step."""
    try:
        grammar = library_form(source)
        matcher = new_matcher(tokenizer, grammar)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(error_of(matcher))
    except (ValueError, RecursionError) as error:
        return Verdict(why=str(error))
    return Verdict(grammar)


def _lower(kind: int, limit: int) -> None:
    """Set the limit that can be raised again."""
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


if __name__ == "__main__":
    sys.exit(main())
