"""Count how many tokens a step yields with drafts (`speculative_config`), for texts that are known:

    python benchmarks/draft_texts.py --repository .

The real scheduler drafts, and each token that it samples is the next one of the text. So the count does not depend on
the machine, and needs no model. Three loads, from a git repository of Python code:

- edits: the prompt is a file before a commit, the answer the whole file after it;
- code: the prompt is the first half of a file, the answer the second;
- prose: the same with Markdown.

Texts become tokens by a byte-pair encoding of 32,000 tokens, trained on Python's standard library and the repository.

--prices: the part of a step's time that one more token takes. The scheduler guesses less where guesses are expensive.
*Speed* is the tokens a second, in relation to those without drafts, where each guess takes so long.
"""

from __future__ import annotations

import argparse
import itertools
import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lending_node import parser, say, table, write_report
from msgspec import structs

from swiftkv._core import GroupSpec, Scheduler
from swiftkv.checkpoint import read_texts, standard_library_files, train_tokenizer
from swiftkv.engine.messages import PromptLookup

_BLOCK_SIZE = 16
_NO_STOP = np.array([], np.int32)


@dataclass(frozen=True)
class Text:
    """A prompt, and the answer that follows it."""

    prompt: list[int]
    answer: list[int]


LOOKUPS = tuple(PromptLookup(*each) for each in ((7, 1, 8), (3, 1, 8), (15, 1, 8), (7, 2, 5), (7, 5, 5)))


@dataclass
class Count:
    """The steps of all texts of a load after the first, which samples the answer's first token."""

    tokens: int = 0
    steps: int = 0
    guesses: int = 0
    right: int = 0

    def add(self, text: Text, lookup: PromptLookup, price: float) -> None:
        length = len(text.prompt) + len(text.answer)
        scheduler = Scheduler(
            [GroupSpec(1, length // _BLOCK_SIZE + 2)],
            block_size=_BLOCK_SIZE,
            max_num_seqs=64,
            max_num_batched_tokens=max(len(text.prompt), 64),
            max_model_len=length + 1,
            **structs.asdict(lookup),
        )
        if price:
            scheduler.remember_step_time([price, 0.0, 0.0, 0.0, 0.0, 1 - price])
        scheduler.add_request(1, np.array(text.prompt, np.int32), len(text.answer), 0, _NO_STOP, b"", False)
        known = np.array(text.prompt + text.answer, np.int32)
        while (plan := scheduler.schedule()) is not None:
            behind = np.minimum(plan.positions[plan.logits_rows] + 1, length - 1)
            scheduler.commit(known[behind])
            self.steps += 1
        stats = scheduler.stats()
        self.steps -= 1
        self.tokens += len(text.answer) - 1
        self.guesses += stats.draft_tokens_total
        self.right += stats.accepted_draft_tokens_total


def git(repository: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=True)
    return done.stdout


def edited_files(repository: Path, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield files before and after a commit that changed them, in random order."""
    lines = git(repository, "log", "--no-merges", "--diff-filter=M", "--format=%H", "--name-only", "--", "*.py")
    commit, changed = "", []
    for line in lines.splitlines():
        if line.endswith(".py"):
            changed.append((commit, line))
        elif line:
            commit = line
    rng.shuffle(changed)
    for commit, path in changed:
        yield git(repository, "show", f"{commit}^:{path}"), git(repository, "show", f"{commit}:{path}")


def halves(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        lines = text.splitlines(keepends=True)
        yield "".join(lines[: len(lines) // 2]), "".join(lines[len(lines) // 2 :])


def texts_of(pairs: Iterator[tuple[str, str]], tokenizer: Any, args: argparse.Namespace) -> list[Text]:
    """Return the first `--texts` pairs that are neither very short nor too long, as tokens."""
    found: list[Text] = []
    for prompt, answer in pairs:
        text = Text(*(tokenizer.encode(each, add_special_tokens=False) for each in (prompt, answer)))
        if len(text.prompt) > 100 and 100 < len(text.answer) <= args.longest:
            found.append(text)
        if len(found) == args.texts:
            break
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--repository", type=Path, required=True, help="a git repository with Python and Markdown")
    options.add_argument("--prices", type=float, nargs="+", default=[0.0, 0.06, 0.3, 0.6])
    options.add_argument("--texts", type=int, default=100, help="texts of each load")
    options.add_argument("--longest", type=int, default=6000, help="the most tokens of an answer")
    args = options.parse_args()
    rng = random.Random(args.seed)
    files = {
        kind: [args.repository / name for name in git(args.repository, "ls-files", f"*.{kind}").splitlines()]
        for kind in ("py", "md")
    }
    tokenizer = train_tokenizer(read_texts(standard_library_files() + files["py"] + files["md"]), 32_000)
    pairs = {"edits": edited_files(args.repository, rng)}
    for name, kind in (("code", "py"), ("prose", "md")):
        texts = [file.read_text(encoding="utf-8") for file in files[kind]]
        rng.shuffle(texts)
        pairs[name] = halves(texts)
    rows, figures = [], []
    for name, of_load in pairs.items():
        texts_of_load = texts_of(of_load, tokenizer, args)
        for lookup, price in itertools.product(LOOKUPS, args.prices):
            count = Count()
            for text in texts_of_load:
                count.add(text, lookup, price)
            speed = count.tokens / (count.steps + price * count.guesses)
            figures.append({"load": name, **structs.asdict(lookup), "price": price, "speed": speed, **asdict(count)})
            drafts = f"{lookup.num_speculative_tokens} guesses, "
            drafts += f"{lookup.prompt_lookup_min} to {lookup.prompt_lookup_max} last tokens"
            rows.append((
                f"{name}, {len(texts_of_load)} texts", drafts, f"{price:g}", f"{count.tokens / count.steps:.2f}",
                f"{count.guesses / count.steps:.2f}", f"{count.right / max(1, count.guesses):.0%}", f"x {speed:.2f}",
            ))  # fmt: skip
    say(table(("load", "drafts", "price", "tokens a step", "guesses a step", "right", "speed"), rows))
    write_report(args, loads=figures)


if __name__ == "__main__":
    main()
