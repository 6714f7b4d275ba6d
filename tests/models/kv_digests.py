"""Prints digests of the keys and values of small models whose numbers depend on no library: `python kv_digests.py DIR`.

Weights are integers that are scaled, and the rotary table is made of fractions, so that all that can change a byte are
the kernels, in this process's instruction set, and what models make of them.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file

from swiftkv._cpu import amx_is_emulated, isa
from swiftkv.models import loader
from swiftkv.models.config import RopeConfig
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config
from tests.support.paged import PagedRunner

ARCHITECTURES = ("qwen3", "gemma3", "qwen3_moe", "gpt_oss")
NUM_TOKENS = 100


def exact_table(rope: RopeConfig, head_dim: int, max_len: int) -> torch.Tensor:
    """Return a table of rotations like `cos_sin_table`, by divisions alone."""
    slopes = torch.arange(1, rope.rotary_dim(head_dim) // 2 + 1, dtype=torch.float32) / 64
    tangents = (torch.arange(max_len, dtype=torch.float32)[:, None] * slopes) % 4
    squares = tangents * tangents
    return torch.cat(((1 - squares) / (1 + squares), 2 * tangents / (1 + squares)), dim=1)


def make_numbers_plain(directory: Path) -> None:
    """Replace a checkpoint's weights by numbers that no generator of random numbers made."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        start = zlib.crc32(name.encode())
        mixed = (torch.arange(tensor.numel(), dtype=torch.int64) + start) * 2654435761 % (1 << 32)
        tensors[name] = ((mixed % 2001 - 1000).float() / 8000).view(tensor.shape).to(tensor.dtype)
    save_file(tensors, directory / "model.safetensors")


def digests(directory: Path) -> Iterator[str]:
    """Yield a line for each architecture, whose checkpoint lies in a directory of that name, and dtype."""
    for architecture in ARCHITECTURES:
        checkpoint = directory / architecture
        for dtype in (torch.bfloat16, torch.float16):
            decoder = load_decoder(read_config(checkpoint), MappedWeights(checkpoint), dtype, "cpu", 128)
            runner = PagedRunner(decoder)
            runner.run({"prompt": [(7 * i * i) % 300 + 3 for i in range(NUM_TOKENS)]}, (NUM_TOKENS,))
            digest = xxhash.xxh3_64()
            for group in runner._groups:
                digest.update(group.memory.view(-1).view(torch.uint8).numpy().data)
            yield f"{architecture} {str(dtype).removeprefix('torch.')} {digest.hexdigest()}"


def main() -> None:
    torch.set_num_threads(1)
    loader.cos_sin_table = exact_table
    print(f"instructions {'amx' if amx_is_emulated() else isa()}")
    for line in digests(Path(sys.argv[1])):
        print(line)


if __name__ == "__main__":
    main()
