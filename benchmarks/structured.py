"""Measure what grammars cost: a mask, a grammar's compilation, and the time per token with and without a grammar:

    swiftkv checkpoint make --arch qwen3 --size small CKPT
    python benchmarks/structured.py CKPT --masks                 # microseconds for each sequence, and compilations
    python benchmarks/structured.py CKPT --engine --rounds 5     # time per output token with and without, interleaved

The masks are those of schemas as people write them, followed with random tokens that they allow, in processor time of
their thread, so that other programs matter little. `--vocabulary 151936` uses that many tokens, trained on the Python
sources of this machine, instead of the checkpoint's. Targets: 50 us at P99 for each sequence, 100 ms to compile, 1.05
times the time per output token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
from llguidance import LLTokenizer
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from swiftkv._core import StepPlan
from swiftkv.engine.engine import Engine
from swiftkv.engine.mask_thread import PendingMasks
from swiftkv.engine.messages import AddRequest, EngineConfig, FromEngine, SamplingParams, StepOutput
from swiftkv.engine.runner import ModelRunner
from swiftkv.engine.token_masks import TokenMasks
from swiftkv.grammars import GrammarSource, library_form, new_matcher
from swiftkv.units import PoolBytes

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.schemas import SCHEMAS

_TRAINED_ON_BYTES = 45 << 20
_PART_OF_FILE_BYTES = 200_000

OPEN_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "body": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "score": {"type": "number"},
    },
    "required": ["title", "body", "tags", "score"],
    "additionalProperties": False,
}
"""Schemas with strings of any length, as most schemas have them."""

LONG_SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1000}
"""A schema of nothing but the strings whose masks take the longest."""


def trained_tokenizer(size: int, target: Path) -> Path:
    """Write a tokenizer with a vocabulary of `size`, trained on the Python sources that this interpreter finds."""
    files = [file for directory in sys.path if directory for file in sorted(Path(directory).rglob("*.py"))]
    random.Random(0).shuffle(files)
    texts: list[str] = []
    num_bytes = 0
    for file in files:
        if num_bytes < _TRAINED_ON_BYTES:
            texts.append(file.read_bytes()[:_PART_OF_FILE_BYTES].decode(errors="ignore"))
            num_bytes += len(texts[-1])
    backend = Backend(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>"],
        initial_alphabet=ByteLevel.alphabet(),
        max_token_length=64,  # sources have lines of hundreds of equal characters
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.save(str(target))
    return target


def measure_masks(directory: Path, vocabulary: int, num_tokens: int) -> None:
    config = json.loads((directory / "config.json").read_text())
    file, size, end = directory / "tokenizer.json", config["vocab_size"], config["eos_token_id"]
    with tempfile.TemporaryDirectory() as temporary:
        if vocabulary:
            file, size, end = trained_tokenizer(vocabulary, Path(temporary) / "tokenizer.json"), vocabulary, 0
        begun_s = time.thread_time()
        tokenizer = LLTokenizer(str(file), n_vocab=size, eos_token=end)
        print(f"{size:,} tokens, read in {time.thread_time() - begun_s:.2f} s")
    rng = np.random.default_rng(0)
    bits = np.zeros((1, -(-size // 32)), np.uint32)
    logits = torch.zeros(1, size)
    compiled_ms, fills_us, forbids_us, advances_us, nums_allowed = [], [], [], [], []
    for name, schema in {**SCHEMAS, "open strings": OPEN_SCHEMA}.items():
        begun_s = time.thread_time()
        fresh = new_matcher(tokenizer, library_form(GrammarSource("json", json.dumps(schema))))
        compiled_ms.append((1e3 * (time.thread_time() - begun_s), name))
        for _ in range(4):
            matcher = fresh.deep_copy()
            for _ in range(num_tokens):
                times = [time.thread_time()]
                matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.strides[0])
                times.append(time.thread_time())
                TokenMasks(np.zeros(1, np.int32), bits).forbid(logits)
                times.append(time.thread_time())
                allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), count=size, bitorder="little"))
                token = int(rng.choice(allowed))
                times.append(time.thread_time())
                nums_allowed.append(len(allowed))
                fills_us.append(1e6 * (times[1] - times[0]))
                forbids_us.append(1e6 * (times[2] - times[1]))
                if token == end:
                    break
                matcher.consume_token(token)
                times.append(time.thread_time())
                advances_us.append(1e6 * (times[4] - times[3]))
                logits.zero_()
    for what, values in (("mask made", fills_us), ("mask applied", forbids_us), ("token taken", advances_us)):
        print(f"{what}: {quantiles(values)} us, {len(values)} times")
    for least, most in pairwise((0, size // 100, size * 9 // 10, size)):
        values = [us for us, count in zip(fills_us, nums_allowed, strict=True) if least < count <= most]
        if values:
            print(
                f"mask made that allows {least + 1:,} to {most:,} tokens: {quantiles(values)} us, {len(values)} times"
            )
    slowest = ", ".join(f"{name} {ms:.1f}" for ms, name in sorted(compiled_ms)[-3:])
    print(f"compiled: {quantiles([ms for ms, _ in compiled_ms])} ms; the slowest: {slowest}")


def quantiles(values: Sequence[float]) -> str:
    low, high = np.percentile(values, [50, 99])
    return f"median {low:.1f}, P99 {high:.1f}, most {max(values):.1f}"


class TimedMasks:
    """The masks of a step; they note how long the step waits for them once the model is done."""

    def __init__(self, masks: PendingMasks, exposed_us: list[float]) -> None:
        self._masks = masks
        self._exposed_us = exposed_us

    def begin(self) -> None:
        self._masks.begin()

    def take(self) -> TokenMasks | None:
        begun_s = time.perf_counter()
        masks = self._masks.take()
        self._exposed_us.append(1e6 * (time.perf_counter() - begun_s))
        return masks


class EngineHere:
    """A real engine in this process, stepped by hand.

    Attributes:
        exposed_us: The time that each step with masks waited for them once its model was done.
    """

    def __init__(self, directory: Path, num_sequences: int, threads: int, max_model_len: int) -> None:
        context = zmq.Context()
        self._to_engine, requests = pair(context, "inproc://requests")
        outputs, self._from_engine = pair(context, "inproc://outputs")
        config = EngineConfig(
            "bench", str(directory), "", "", PoolBytes(1 << 30), max_model_len, threads=threads,
            max_num_seqs=num_sequences,
        )  # fmt: skip
        self._engine = Engine(config, ModelRunner(config), requests, outputs, context)
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._next_id = 1
        self.exposed_us: list[float] = []
        grammars: Any = self._engine._grammars
        masks_of = grammars.masks_of

        def timed(plan: StepPlan) -> TimedMasks | None:
            masks = masks_of(plan)
            return None if masks is None else TimedMasks(masks, self.exposed_us)

        grammars.masks_of = timed

    def close(self) -> None:
        self._engine._grammars.close()

    def time_per_token_ms(self, count: int, sampling: SamplingParams) -> float:
        """Return the median time between two tokens of `count` sequences that run together."""
        prompt = np.arange(3, 67, dtype=np.int32).tobytes()
        for _ in range(count):
            self._to_engine.send(msgspec.msgpack.encode(AddRequest(self._next_id, prompt, sampling)))
            self._next_id += 1
        running, steps_ms = count, []
        while running:
            self._engine._wait()
            for message in self._engine._receive():
                self._engine._handle(message)  # type: ignore[arg-type]
            self._engine._take_compiled()
            while self._engine._scheduler.has_work():
                begun_s = time.perf_counter()
                self._engine.step()
                took_ms = 1e3 * (time.perf_counter() - begun_s)
                tokens, ended = self._outcome()
                running -= ended
                if tokens == count and not ended:
                    steps_ms.append(took_ms)
        return statistics.median(steps_ms)

    def _outcome(self) -> tuple[int, int]:
        tokens = ended = 0
        while self._from_engine.poll(0):
            message = self._decoder.decode(self._from_engine.recv())
            assert isinstance(message, StepOutput), message
            tokens += len(message.finish_reasons)
            ended += sum(map(bool, message.finish_reasons))
        return tokens, ended


def pair(context: zmq.Context[Any], address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.bind(address)
    pull.connect(address)
    return push, pull


def measure_engine(
    directory: Path, schema: object, counts: Sequence[int], *, rounds: int, num_tokens: int, threads: int
) -> None:
    grammar = library_form(GrammarSource("json", json.dumps(schema), ""))
    free = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=1, ignore_eos=True)
    held = msgspec.structs.replace(free, grammar=grammar, ignore_eos=False)
    with closing(EngineHere(directory, max(counts), threads, 64 + num_tokens + 16)) as engine, torch.inference_mode():
        for count in counts:
            engine.time_per_token_ms(count, held)
            engine.exposed_us.clear()
            pairs = [
                (engine.time_per_token_ms(count, free), engine.time_per_token_ms(count, held)) for _ in range(rounds)
            ]
            ratios = [with_grammar / without for without, with_grammar in pairs]
            without, with_grammar = (statistics.median(values) for values in zip(*pairs, strict=True))
            print(
                f"{count} sequences: {without:.2f} ms per token without, {with_grammar:.2f} with, "
                f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); "
                f"a step waits for its masks {quantiles(engine.exposed_us)} us"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--vocabulary", type=int, default=0)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--max-length", action="store_true", help="with --engine: use strings that have a maxLength")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if args.masks:
        measure_masks(args.checkpoint, args.vocabulary, args.tokens)
    if args.engine:
        schema = LONG_SCHEMA if args.max_length else OPEN_SCHEMA
        limits = {"rounds": args.rounds, "num_tokens": args.tokens, "threads": args.threads}
        measure_engine(args.checkpoint, schema, args.sequences, **limits)


if __name__ == "__main__":
    main()
