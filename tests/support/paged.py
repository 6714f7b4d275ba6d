"""Run a decoder on paged KV as an engine would, without a scheduler: any blocks, any chunks, any mixture."""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from swiftkv._core import NO_BLOCK
from swiftkv.cache.geometry import KVGroup
from swiftkv.models.batch import ModelInput
from swiftkv.models.decoder import Decoder
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config


class _Group:
    """The memory of one KV group's blocks, and the blocks of each sequence. Free blocks hold garbage."""

    def __init__(self, group: KVGroup, memory: Tensor, entries: Sequence[int], rng: random.Random) -> None:
        """`entries` are those of blocks in a table, whole (the first layer block) or of one layer for all (`~`)."""
        self.memory = memory
        self._group = group
        for entry in entries:
            self._fill_with_garbage(entry)
        self._free = rng.sample(entries, len(entries))
        self._entries: dict[str, list[int]] = defaultdict(list)

    def grow(self, name: str, num_tokens: int) -> None:
        """Make room for a sequence of `num_tokens`."""
        while len(self._entries[name]) * self._group.block_size < num_tokens:
            self._entries[name].append(self._free.pop())

    def slide(self, name: str, num_tokens: int) -> None:
        """Free the blocks that no token after the first `num_tokens` looks back on."""
        if not self._group.window:
            return
        first_seen = max(0, num_tokens + 1 - self._group.window)
        for i in range(first_seen // self._group.block_size):
            entry, self._entries[name][i] = self._entries[name][i], NO_BLOCK
            if entry != NO_BLOCK:
                self._fill_with_garbage(entry)
                self._free.insert(0, entry)

    def table(self, name: str) -> list[int]:
        return self._entries[name]

    def _fill_with_garbage(self, entry: int) -> None:
        """Set all bits, which is NaN in every dtype: it shows if a kernel reads what was never written."""
        first, num_layers = (~entry, 1) if entry < 0 else (entry, self._group.num_layers)
        width = self._group.layer_block_bytes
        self.memory[first * width : (first + num_layers) * width] = 0xFF


class PagedRunner:
    """Sequences by name, each with blocks drawn at random from pools that start as garbage."""

    def __init__(
        self, decoder: Decoder, num_blocks: int = 64, seed: int = 0, shared_layers: bool = False, device: str = "cpu"
    ) -> None:
        """`shared_layers`: table entries name one layer block for all layers instead of a whole block."""
        self.decoder = decoder
        self._rng = random.Random(seed)
        self._lengths: dict[str, int] = defaultdict(int)
        self._groups = []
        for group in decoder.kv_groups:
            memory = torch.zeros(num_blocks * group.block_bytes, dtype=torch.uint8, device=device)
            entries = [~block if shared_layers else block * group.num_layers for block in range(num_blocks)]
            self._groups.append(_Group(group, memory, entries, self._rng))

    def use(self, index: int, memory: Tensor, entries: Sequence[int]) -> None:
        """Have the blocks of a group in `memory`, where `entries` name them. Call before the first step."""
        self._groups[index] = _Group(self.decoder.kv_groups[index], memory, entries, self._rng)

    def step(self, tokens: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Compute the next tokens of some sequences together; return float32 logits [tokens, vocab] of each."""
        for name, new in tokens.items():
            for group in self._groups:
                group.grow(name, self._lengths[name] + len(new))
        batch = self._batch(tokens)
        logits = self.decoder.logits(self.decoder.forward(batch, [group.memory for group in self._groups]))
        for name, new in tokens.items():
            self._lengths[name] += len(new)
            for group in self._groups:
                group.slide(name, self._lengths[name])
        return dict(zip(tokens, logits.split([len(new) for new in tokens.values()]), strict=True))

    def run(self, prompts: Mapping[str, Sequence[int]], chunk_sizes: Sequence[int]) -> dict[str, Tensor]:
        """Compute all prompts, each cut into chunks (sizes in turn, each prompt beginning with another)."""
        logits: dict[str, list[Tensor]] = defaultdict(list)
        done = dict.fromkeys(prompts, 0)
        turn = 0
        while any(done[name] < len(prompt) for name, prompt in prompts.items()):
            tokens = {}
            for i, (name, prompt) in enumerate(prompts.items()):
                if done[name] < len(prompt):
                    size = chunk_sizes[(turn + i) % len(chunk_sizes)]
                    tokens[name] = prompt[done[name] : done[name] + size]
                    done[name] += len(tokens[name])
            for name, rows in self.step(tokens).items():
                logits[name].append(rows)
            turn += 1
        return {name: torch.cat(rows) for name, rows in logits.items()}

    def _batch(self, tokens: Mapping[str, Sequence[int]]) -> ModelInput:
        starts = {name: self._lengths[name] for name in tokens}
        tables = [[group.table(name) for name in tokens] for group in self._groups]
        return ModelInput(
            token_ids=int32([token for new in tokens.values() for token in new]),
            positions=int32([starts[name] + i for name, new in tokens.items() for i in range(len(new))]),
            query_starts=int32(offsets([len(new) for new in tokens.values()])),
            context_lens=int32([starts[name] + len(new) for name, new in tokens.items()]),
            stream_tables=(tuple(int32([entry for table in of for entry in table]) for of in tables),),
            table_starts=tuple(int32(offsets([len(table) for table in of])) for of in tables),
        )


def offsets(lengths: Sequence[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def main() -> None:
    """Compute logits in a process of another environment. Arguments: DIRECTORY OUT.

    Standard input has prompts, lists of chunk sizes and dtypes. OUT gets the logits, as `dtype/prompt/number of the
    list`.
    """
    directory, out = Path(sys.argv[1]), sys.argv[2]
    task = json.load(sys.stdin)
    results = {}
    for dtype in task["dtypes"]:
        config = read_config(directory)
        decoder = load_decoder(config, MappedWeights(directory), getattr(torch, dtype), "cpu", 128)
        assert decoder.ops.name == "cpu"
        for i, chunks in enumerate(task["chunks"]):
            for name, logits in PagedRunner(decoder, seed=i).run(task["prompts"], chunks).items():
                results[f"{dtype}/{name}/{i}"] = logits
    save_file(results, out)


if __name__ == "__main__":
    main()
