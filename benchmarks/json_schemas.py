"""Measure grammars of real JSON schemas: which compile, how long that takes, and whether generated answers are valid:

    git clone https://github.com/guidance-ai/jsonschemabench
    python benchmarks/json_schemas.py jsonschemabench/maskbench/data --each 40

--each schemas are drawn from each collection of JSONSchemaBench, and --answers answers from each schema, at random
among the tokens that its grammar allows. `jsonschema_rs` checks the answers that end. The collection's own instances
are followed, too: it is a fault if the grammar accepts an invalid one; it may refuse a valid one, because properties
keep the schema's order. Times are processor time of the thread.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import numpy.typing as npt
from lending_node import say, table
from llguidance import LLMatcher, LLTokenizer
from structured import trained_tokenizer  # makes the tests importable, too

from swiftkv.grammars import GrammarSource, library_form, new_matcher
from tests.support.json_answers import finite, lets_through

END = 0  # the token that ends an answer
ENDS = 0.4  # the probability of a token that ends a string, a list, an object or the answer, where one is allowed
_SHOWN = 160


@dataclass
class Findings:
    """The findings in one collection, or in all together."""

    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by the first words of the reason
    compiled_ms: list[float] = field(default_factory=list)
    masks_us: list[float] = field(default_factory=list)
    ended: int = 0
    too_costly: int = 0  # answers for which the library gave up making a mask
    invalid: list[str] = field(default_factory=list)
    let_through: list[str] = field(default_factory=list)
    valid_instances: int = 0
    followed_instances: int = 0

    def row(self, name: str) -> list[str]:
        def at(values: list[float], part: float) -> str:
            return f"{np.percentile(values, part):,.1f}" if values else "-"

        compiled = self.schemas - self.refused.total()
        return [
            name,
            f"{compiled} of {self.schemas}",
            f"{at(self.compiled_ms, 50)} / {at(self.compiled_ms, 99)} / {at(self.compiled_ms, 100)}",
            f"{at(self.masks_us, 50)} / {at(self.masks_us, 99)} / {at(self.masks_us, 100)}",
            f"{self.ended}, {len(self.invalid)} invalid",
            f"{self.followed_instances} of {self.valid_instances}",
            str(len(self.let_through)),
        ]


def answers(
    grammar: LLMatcher, endings: npt.NDArray[np.bool_], args: argparse.Namespace, findings: Findings
) -> Iterator[list[int]]:
    """Yield answers drawn at random that end in time."""
    rng = np.random.default_rng(args.seed)
    bits = np.zeros(-(-args.vocabulary // 32), np.uint32)
    for _ in range(args.answers):
        matcher, tokens = grammar.deep_copy(), list[int]()
        while len(tokens) < args.tokens:
            began_s = time.thread_time()
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            findings.masks_us.append(1e6 * (time.thread_time() - began_s))
            if matcher.is_error():
                findings.too_costly += 1
                break
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), count=args.vocabulary, bitorder="little"))
            ending = allowed[endings[allowed]]
            token = int(rng.choice(ending if len(ending) and rng.random() < ENDS else allowed))
            if token == END:
                yield tokens
                break
            assert matcher.consume_token(token)
            tokens.append(token)


def examine(
    case: dict[str, Any],
    tokenizer: LLTokenizer,
    endings: npt.NDArray[np.bool_],
    args: argparse.Namespace,
    findings: Findings,
) -> None:
    schema, findings.schemas = case["schema"], findings.schemas + 1
    began_s = time.thread_time()
    try:
        grammar = new_matcher(tokenizer, library_form(GrammarSource("json", json.dumps(schema))))
    except ValueError as error:
        findings.refused[" ".join(str(error).split()[:4])] += 1
        return
    findings.compiled_ms.append(1e3 * (time.thread_time() - began_s))
    for test in case.get("tests", ()):
        follow(grammar, tokenizer, test, findings)
    try:
        validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    except ValueError:
        return  # not a schema of any draft, as some collections have them
    for tokens in answers(grammar, endings, args, findings):
        text = tokenizer.decode_str(tokens)
        findings.ended += 1
        if not validator.is_valid(json.loads(text, parse_float=finite)):
            findings.invalid.append(text)


def follow(grammar: LLMatcher, tokenizer: LLTokenizer, test: dict[str, Any], findings: Findings) -> None:
    """Follow an instance that the collection calls valid or invalid."""
    text = json.dumps(test["data"], ensure_ascii=False)
    is_let_through = lets_through(tokenizer, grammar, text)
    if test["valid"]:
        findings.valid_instances += 1
        findings.followed_instances += is_let_through
    elif is_let_through:
        findings.let_through.append(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="the directory maskbench/data of jsonschemabench")
    parser.add_argument("--each", type=int, default=40, help="schemas of each collection")
    parser.add_argument("--answers", type=int, default=3, help="answers for each schema")
    parser.add_argument("--tokens", type=int, default=200, help="the most tokens of an answer")
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=32_000,
        help="tokens of the vocabulary, which is trained on Python sources of this machine",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    collections: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(args.directory.glob("*.json")):
        collections[re.sub(r"(---.*|_?\d*\.json)$", "", file.name)].append(file)
    with tempfile.TemporaryDirectory() as temporary:
        file = trained_tokenizer(args.vocabulary, Path(temporary) / "tokenizer.json")
        tokenizer = LLTokenizer(str(file), n_vocab=args.vocabulary, eos_token=END)
    texts = [tokenizer.decode_str([token]) for token in range(args.vocabulary)]
    endings = np.array([token == END or text[:1] in ('"', "]", "}") for token, text in enumerate(texts)])
    rows, together = [], Findings()
    for name, files in collections.items():
        findings = Findings()
        for path in random.Random(args.seed).sample(files, min(args.each, len(files))):
            examine(json.loads(path.read_text()), tokenizer, endings, args, findings)
        rows.append(findings.row(name))
        for kind, wrong in (("invalid", findings.invalid), ("let through", findings.let_through)):
            for text in wrong:
                say(f"{name}: {kind}: {text[:_SHOWN]}")
        for key, value in vars(findings).items():
            setattr(together, key, getattr(together, key) + value)
    heads = [
        "collection",
        "compiled",
        "compiling, ms: median / P99 / most",
        "a mask, µs: median / P99 / most",
        "answers",
    ]
    say(table([*heads, "valid instances followed", "invalid ones let through"], [*rows, together.row("all")]))
    say(f"refused: {dict(together.refused.most_common(12))}; masks given up: {together.too_costly}")


if __name__ == "__main__":
    main()
