"""Measure llguidance and xgrammar on the same grammars: masks, compilations, and mistakes:

    pip install xgrammar       # the package itself does not need it
    python benchmarks/grammar_libraries.py --vocabulary 151936
    python benchmarks/grammar_libraries.py --vocabulary 151936 --hostile

The grammars are those of `structured.py`. Each is followed with random tokens that it allows; times are processor time
of the thread. A library makes a mistake if it lets a model finish a text that `jsonschema` refuses, or if it refuses a
valid text that the other library finished. Hostile grammars run in a process of their own, with the limits of a
gateway's check.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as Backend

sys.path.insert(0, str(Path(__file__).parents[1]))
from structured import OPEN_SCHEMA, quantiles, trained_tokenizer

from swiftkv.grammars import GrammarSource, library_form, new_matcher
from tests.support.schemas import ENDLESS, HOSTILE, SCHEMAS

END = 0  # the token that ends an answer
_FORMATS = jsonschema.FormatChecker()
_HOSTILE_S, _HOSTILE_BYTES = 30, 8 << 30
_STEPS_OF_HOSTILE = 64


class Matcher(Protocol):
    """A place in a grammar."""

    def fill(self, bits: npt.NDArray[np.uint32]) -> None:
        """Write the mask of the next token."""

    def take(self, token_id: int) -> bool:
        """Advance by a token, and return whether the grammar allows it."""


class Library(Protocol):
    name: str

    def compiled(self, source: GrammarSource) -> Any:
        """Compile a grammar."""

    def matcher(self, compiled: Any) -> Matcher:
        """Return a matcher at the beginning of a compiled grammar."""


@dataclass
class LlguidanceMatcher:
    inner: LLMatcher

    def fill(self, bits: npt.NDArray[np.uint32]) -> None:
        self.inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self.inner.is_error():
            raise ValueError(self.inner.get_error())

    def take(self, token_id: int) -> bool:
        return self.inner.consume_token(token_id)


class Llguidance:
    name = "llguidance"

    def __init__(self, file: Path, size: int) -> None:
        self._tokenizer = LLTokenizer(str(file), n_vocab=size, eos_token=END)

    def compiled(self, source: GrammarSource) -> LLMatcher:
        return new_matcher(self._tokenizer, library_form(source))

    def matcher(self, compiled: LLMatcher) -> LlguidanceMatcher:
        return LlguidanceMatcher(compiled.deep_copy())


@dataclass
class XgrammarMatcher:
    inner: Any

    def fill(self, bits: npt.NDArray[np.uint32]) -> None:
        self.inner.fill_next_token_bitmask(bits.view(np.int32).reshape(1, -1))

    def take(self, token_id: int) -> bool:
        return bool(self.inner.accept_token(token_id))


class Xgrammar:
    name = "xgrammar"

    def __init__(self, file: Path, size: int) -> None:
        import xgrammar

        backend = Backend.from_file(str(file))
        vocabulary = [backend.id_to_token(token_id) or "" for token_id in range(size)]
        info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=[END])
        self._library = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compiled(self, source: GrammarSource) -> Any:
        match source.kind:
            case "json":
                return self._compiler.compile_json_schema(source.text, strict_mode=False, max_whitespace_cnt=64)
            case "regex":
                return self._compiler.compile_regex(source.text)
            case _:
                return self._compiler.compile_lark(source.text)

    def matcher(self, compiled: Any) -> XgrammarMatcher:
        return XgrammarMatcher(self._library.GrammarMatcher(compiled))


LIBRARIES: dict[str, type[Llguidance] | type[Xgrammar]] = {"llguidance": Llguidance, "xgrammar": Xgrammar}


@dataclass
class Walks:
    """The results of following grammars at random."""

    compiled_ms: dict[str, float] = field(default_factory=dict)
    fills_us: list[float] = field(default_factory=list)
    takes_us: list[float] = field(default_factory=list)
    finished: list[tuple[str, list[int]]] = field(default_factory=list)  # a schema's name, and tokens
    failed: dict[str, str] = field(default_factory=dict)  # why a schema could not be compiled or followed


def walked(library: Library, schemas: dict[str, Any], size: int, *, rounds: int, num_tokens: int) -> Walks:
    walks, bits = Walks(), np.zeros(-(-size // 32), np.uint32)
    rng = np.random.default_rng(0)
    for name, schema in schemas.items():
        begun_s = time.process_time()
        try:
            compiled = library.compiled(GrammarSource("json", json.dumps(schema)))
            walks.compiled_ms[name] = 1e3 * (time.process_time() - begun_s)
            for _ in range(rounds):
                tokens = _walk(library.matcher(compiled), bits, size, rng, num_tokens, walks)
                if tokens is not None:
                    walks.finished.append((name, tokens))
        except (ValueError, RuntimeError) as error:
            walks.failed[name] = str(error).splitlines()[0][:100]
    return walks


def _walk(
    matcher: Matcher, bits: npt.NDArray[np.uint32], size: int, rng: np.random.Generator, num_tokens: int, walks: Walks
) -> list[int] | None:
    """Return the tokens of an answer, or `None` if it does not end within `num_tokens`."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        begun_s = time.thread_time()
        matcher.fill(bits)
        walks.fills_us.append(1e6 * (time.thread_time() - begun_s))
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), count=size, bitorder="little"))
        token = int(rng.choice(allowed))
        if token == END:
            return tokens
        tokens.append(token)
        begun_s = time.thread_time()
        taken = matcher.take(token)
        walks.takes_us.append(1e6 * (time.thread_time() - begun_s))
        if not taken:
            raise ValueError("does not take a token of its own mask")
    return None


def compare(libraries: Sequence[Library], file: Path, size: int, rounds: int, num_tokens: int) -> None:
    schemas = {**SCHEMAS, "open strings": OPEN_SCHEMA}
    backend = Backend.from_file(str(file))
    texts: dict[str, list[tuple[str, list[int]]]] = {}
    for library in libraries:
        walks = walked(library, schemas, size, rounds=rounds, num_tokens=num_tokens)
        print(f"{library.name}: mask {quantiles(walks.fills_us)} us, {len(walks.fills_us)} times")
        print(f"{library.name}: token taken {quantiles(walks.takes_us)} us")
        slowest = ", ".join(f"{name} {ms:.1f}" for name, ms in sorted(walks.compiled_ms.items(), key=_cost)[-3:])
        print(f"{library.name}: compiled {quantiles([*walks.compiled_ms.values()])} ms; the slowest: {slowest}")
        wrong = [(name, tokens) for name, tokens in walks.finished if not _is_valid(backend, tokens, schemas[name])]
        texts[library.name] = [each for each in walks.finished if each not in wrong]
        by_name = ", ".join(sorted({name for name, _ in wrong}))
        print(f"{library.name}: {len(walks.finished)} answers, {len(wrong)} of them invalid ({by_name})")
        print(f"{library.name}: cannot follow {walks.failed}", flush=True)
    for library in libraries:
        for other, answers in texts.items():
            if other != library.name:
                refused = [name for name, tokens in answers if not _takes(library, schemas[name], tokens)]
                print(
                    f"{library.name}: refuses {len(refused)} of {len(answers)} valid answers of {other}: {set(refused)}"
                )


def _cost(item: tuple[str, float]) -> float:
    return item[1]


def _is_valid(backend: Backend, tokens: Sequence[int], schema: Any) -> bool:
    text = backend.decode(list(tokens), skip_special_tokens=False)
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=_FORMATS)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _takes(library: Library, schema: Any, tokens: Sequence[int]) -> bool:
    try:
        matcher = library.matcher(library.compiled(GrammarSource("json", json.dumps(schema))))
        return all(matcher.take(token) for token in tokens)
    except (ValueError, RuntimeError):
        return False


def follow_hostile(library: Library, source: GrammarSource, size: int, told: Connection) -> None:
    """Compile and follow a grammar, and report how long that took."""
    resource.setrlimit(resource.RLIMIT_AS, (_HOSTILE_BYTES, _HOSTILE_BYTES))
    begun_s = time.process_time()
    steps: list[float] = []
    try:
        matcher = library.matcher(library.compiled(source))
        compiled_s = time.process_time() - begun_s
        bits, rng = np.zeros(-(-size // 32), np.uint32), np.random.default_rng(0)
        for _ in range(_STEPS_OF_HOSTILE):
            step_s = time.process_time()
            matcher.fill(bits)
            steps.append(1e3 * (time.process_time() - step_s))
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), count=size, bitorder="little"))
            token = int(rng.choice(allowed)) if len(allowed) else END
            if token == END or not matcher.take(token):
                break
        told.send(f"compiled in {compiled_s:.2f} s, {len(steps)} masks of up to {max(steps, default=0.0):.1f} ms")
    except (ValueError, RuntimeError, RecursionError, MemoryError) as error:
        took_s, reason = time.process_time() - begun_s, str(error).strip().splitlines() or [type(error).__name__]
        told.send(f"refused after {took_s:.2f} s and {len(steps)} masks: {reason[0][:80]}")


def compare_hostile(libraries: Sequence[Library], size: int) -> None:
    context = multiprocessing.get_context("fork")
    for name, source in {**HOSTILE, **ENDLESS}.items():
        for library in libraries:
            ours, theirs = context.Pipe(duplex=False)
            grammar = GrammarSource(*source)  # type: ignore[arg-type]
            process = context.Process(target=follow_hostile, args=(library, grammar, size, theirs))
            process.start()
            theirs.close()
            outcome = f"more than {_HOSTILE_S} s"
            if ours.poll(_HOSTILE_S):
                try:
                    outcome = ours.recv()
                except EOFError:
                    process.join()
                    outcome = f"the process ended with {process.exitcode}"
            process.kill()
            process.join()
            print(f"{name} | {library.name} | {outcome}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=list(LIBRARIES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--file", type=Path, help="a tokenizer.json to use; default: one is trained")
    parser.add_argument("--hostile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        file = args.file or Path(temporary) / "tokenizer.json"
        if not file.exists():
            trained_tokenizer(args.vocabulary, file)
        libraries = [LIBRARIES[name](file, args.vocabulary) for name in args.libraries]
        if args.hostile:
            compare_hostile(libraries, args.vocabulary)
        else:
            compare(libraries, file, args.vocabulary, args.rounds, args.tokens)


if __name__ == "__main__":
    main()
