"""Traces of real traffic: when requests came, how long they were, and which of their prompts begin alike.

Two formats are read: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each 512
tokens of the prompt (Mooncake's), and CSV with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens` (Azure's), which does
not say which prompts begin alike, so none do here.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from swiftkv.bench.datasets import DatasetError
from swiftkv.units import LARGEST_COUNT

BLOCK_TOKENS = 512
"""The number of a prompt's tokens that one id stands for."""

_MOST_TOKENS = 100_000_000
"""More tokens than any model reads or writes at once."""


@dataclass(frozen=True)
class Arrival:
    """A request of a trace, with its time and lengths."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """The identity of each `block_tokens` tokens of the prompt."""
    block_tokens: int = BLOCK_TOKENS
    flow: int = 0
    """The flow that it belongs to; traces do not say."""
    priority: int = 0
    """Its priority in the scheduler; traces do not say."""
    conversation: int | None = None
    """The conversation that this is a turn of, if known: the client sends the next turn when it has the answer."""

    def prompt(self) -> npt.NDArray[np.int32]:
        """Return token ids, [input_tokens]: each is the id of its block, since prompts are only compared."""
        return np.repeat(np.array(self.blocks, np.int32), self.block_tokens)[: self.input_tokens]


_InputTokens = Annotated[int, msgspec.Meta(ge=1, le=_MOST_TOKENS)]
_OutputTokens = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]


class _Conversation(msgspec.Struct):
    """A line of Mooncake's."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _InputTokens
    output_length: _OutputTokens
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]]


class _Lengths(msgspec.Struct):
    """A row of Azure's."""

    TIMESTAMP: str
    ContextTokens: _InputTokens
    GeneratedTokens: _OutputTokens


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace, ordered by time. Raises `DatasetError` if it cannot be read or is empty."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            arrivals = list(_conversations(file) if path.suffix.lower() in (".jsonl", ".json") else _lengths(file))
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise DatasetError(
            f"{path} is not a trace (JSON lines like Mooncake's, or CSV like Azure's): {error}"
        ) from None
    if not arrivals:
        raise DatasetError(f"{path} has no requests")
    return sorted(arrivals, key=lambda arrival: arrival.time_s)


def spread_ties(arrivals: Sequence[Arrival], rng: np.random.Generator) -> list[Arrival]:
    """Spread requests with one timestamp until the next, at random: some traces have steps of seconds."""
    times_s = np.array([arrival.time_s for arrival in arrivals])
    instants_s, index, sizes = np.unique(times_s, return_inverse=True, return_counts=True)
    gaps_s = np.diff(instants_s, append=instants_s[-1])
    moved_s = times_s + np.where(sizes[index] > 1, gaps_s[index] * rng.random(len(times_s)), 0.0)
    moved = [replace(arrival, time_s=float(time_s)) for arrival, time_s in zip(arrivals, moved_s, strict=True)]
    return sorted(moved, key=lambda arrival: arrival.time_s)


def _conversations(lines: Iterable[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        with _mistakes_in_line(number):
            entry = msgspec.json.decode(line, type=_Conversation)
            if len(entry.hash_ids) < math.ceil(entry.input_length / BLOCK_TOKENS):
                raise ValueError(
                    f"{len(entry.hash_ids)} hash_ids do not stand for input_length {entry.input_length}: there is one "
                    f"for each {BLOCK_TOKENS} tokens"
                )
        yield Arrival(entry.timestamp / 1000, entry.input_length, entry.output_length, tuple(entry.hash_ids))


def _lengths(lines: Iterable[str]) -> Iterator[Arrival]:
    start, fresh = None, count()
    rows = csv.DictReader(lines)
    for row in rows:
        with _mistakes_in_line(rows.line_num):
            entry = msgspec.convert(row, _Lengths, strict=False)
            now = _without_zone(entry.TIMESTAMP)
        start = start or now
        blocks = tuple(next(fresh) for _ in range(math.ceil(entry.ContextTokens / BLOCK_TOKENS)))
        yield Arrival((now - start).total_seconds(), entry.ContextTokens, entry.GeneratedTokens, blocks)


def _without_zone(timestamp: str) -> datetime:
    """Read a time whose seconds may have more digits than microseconds; its zone, if it has one, is UTC."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", timestamp)).replace(tzinfo=None)


@contextmanager
def _mistakes_in_line(number: int) -> Iterator[None]:
    try:
        yield
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"line {number}: {error}") from None
