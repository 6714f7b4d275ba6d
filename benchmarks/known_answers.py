"""Questions whose answers are known, because a node without lending and without faults has answered them before.

Answers depend on the prompt alone, not on what is cached, lent, recalled or started again meanwhile. So a token that
differs is wrong.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from lending_node import EXTRA, Node, model

from swiftkv.bench.client import Target, TimedAnswer, send

_TOKEN_IDS = (300, 4000)
"""The range of token ids that are words of the demo models' vocabulary."""
_POOL = "256MiB"
_MAX_AT_ONCE = 8


@dataclass(frozen=True)
class Question:
    """A prompt, and the number of tokens to generate greedily."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Known:
    """A question with its right answer."""

    question: Question
    token_ids: tuple[int, ...]

    def is_wrong(self, answer: TimedAnswer) -> bool:
        """Return whether any token differs; an answer that broke off must be right as far as it goes."""
        tokens = tuple(answer.token_ids)
        return tokens != self.token_ids[: len(tokens) if answer.error else None]


class Reference:
    """A node without lending and with room for everything; its models have the names of their checkpoints."""

    def __init__(self, checkpoints: Sequence[Path], max_model_len: int) -> None:
        models = [model(path.name, path, _POOL, max_model_len=max_model_len, threads=1) for path in checkpoints]
        self._node = Node("reference", {"lending": False}, models)

    def __enter__(self) -> Reference:
        self._node.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._node.stop()

    def answer(self, checkpoint: Path, questions: Sequence[Question]) -> list[Known]:
        """Ask all questions, some at a time, and return them with their answers."""
        return asyncio.run(self._answer(checkpoint.name, questions))

    async def _answer(self, name: str, questions: Sequence[Question]) -> list[Known]:
        places = asyncio.Semaphore(_MAX_AT_ONCE)
        async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

            async def ask(question: Question) -> Known:
                async with places:
                    answer = await send(client, self._node.target(name), list(question.prompt), question.max_tokens)
                if answer.error:
                    raise SystemExit(f"the reference did not answer: {answer.error}")
                return Known(question, tuple(answer.token_ids))

            return list(await asyncio.gather(*map(ask, questions)))


def converse(
    reference: Reference, checkpoint: Path, seed: int, number: int, turns: int, question_tokens: int, max_tokens: int
) -> list[list[Known]]:
    """Hold `number` conversations, in which each question continues the earlier questions and answers."""
    rng = random.Random(seed)
    conversations: list[list[Known]] = [[] for _ in range(number)]
    for _ in range(turns):
        questions = []
        for conversation in conversations:
            history = (*conversation[-1].question.prompt, *conversation[-1].token_ids) if conversation else ()
            added = [rng.randrange(*_TOKEN_IDS) for _ in range(rng.randint(question_tokens // 2, question_tokens))]
            questions.append(Question((*history, *added), rng.randint(max_tokens // 4, max_tokens)))
        for conversation, known in zip(conversations, reference.answer(checkpoint, questions), strict=True):
            conversation.append(known)
    return conversations


async def ask(client: httpx.AsyncClient, url: str, name: str, known: Known) -> TimedAnswer:
    """Ask the model `name` of the node at `url`."""
    target = Target(f"{url}/v1/completions", name, extra_body=EXTRA)
    return await send(client, target, list(known.question.prompt), known.question.max_tokens)
