"""Note what Triton would compile while requests wait, without a GPU; `test_triton_compiles` runs this program.

Prints a line for each kernel that steps need and the warm-up does not compile.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from swiftkv.arithmetic import ceil_div
from swiftkv.engine.device import run_largest_step, run_long_step
from swiftkv.engine.device_sampler import DeviceSampler
from swiftkv.engine.messages import EngineConfig
from swiftkv.engine.token_masks import TokenMasks
from swiftkv.engine.token_sampler import LogitRows
from swiftkv.kernels.dispatch import reference_ops, triton_ops
from swiftkv.models.batch import ModelInput
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config
from swiftkv.units import PoolBytes
from tests.engine.test_sampler import make_request
from tests.support.checkpoints import make_checkpoint
from tests.support.offline_gpu import note_instead_of_compiling

CPU = torch.device("cpu")
MAX_LEN = 1000
ROWS = 9
SHAPE = {"num_hidden_layers": 2, "head_dim": 128, "hidden_size": 256, "intermediate_size": 384}
SHAPE |= {"max_position_embeddings": MAX_LEN}
PARAMS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 1},
    {"presence_penalty": 1.0},
    {"logit_bias": {3: 1.0, 5: -1.0, 9: 0.5}, "min_tokens": 2},
]


def sample(vocab_size: int, noted: set[tuple[str, str]]) -> None:
    """Sample for any number of rows, of requests with all kinds of parameters, after the warm-up."""
    sampler = DeviceSampler(vocab_size, torch.zeros(ROWS, dtype=torch.int32))
    warm = set(noted)
    num_words = ceil_div(vocab_size, 32)
    for num_top in (None, 0, 1, 2, 3, 20, 33, 100):
        for slot in range(ROWS):
            params = PARAMS[slot % len(PARAMS)] | ({} if num_top is None else {"logprobs": num_top})
            sampler.seat(slot, make_request(slot, [1, 2, 3], **params))
        for num_rows in range(1, ROWS + 1):
            slots = np.arange(num_rows, dtype=np.int32)
            if num_rows > 2:
                slots[-1] = slots[-2]  # a draft after a row that counts tokens
            masks = TokenMasks(np.arange(num_rows, dtype=np.int32), np.zeros((num_rows, num_words), np.uint32))
            sampler.sample(LogitRows(torch.zeros(num_rows, vocab_size), slots, np.full(num_rows, 3, np.int32), masks))
    for num_rows in (1, 2, 3):
        logits = torch.zeros(num_rows, vocab_size)
        sampler.token_logprobs(logits, np.zeros(num_rows, np.int32), [num_rows] * num_rows)
    report(warm, noted)


def forward(directory: Path, block_size: int, noted: set[tuple[str, str]]) -> None:
    """Run prompts and single tokens of many lengths, after the steps that measure memory."""
    decoder_config = read_config(directory)
    config = EngineConfig(
        "toy", str(directory), "", "", PoolBytes(0), MAX_LEN, max_num_seqs=8, max_num_batched_tokens=256
    )
    # cuBLAS multiplies bfloat16 to float32, torch on the CPU does not.
    ops: Any = SimpleNamespace(**vars(triton_ops()) | {"logits": reference_ops().logits})
    decoder = load_decoder(decoder_config, MappedWeights(directory), torch.bfloat16, "cpu", MAX_LEN, block_size, ops)
    run_largest_step(config, decoder, CPU)
    run_long_step(config, decoder, CPU)
    warm = set(noted)
    for lengths in ([(0, 1)], [(3, 1), (999, 1)], [(0, 7), (5, 1), (900, 16)], [(40, 2)] * 3, [(100, 1)] * 5):
        counts = [-(-(cached + new) // block_size) for cached, new in lengths]
        batch = ModelInput(
            token_ids=torch.zeros(sum(new for _, new in lengths), dtype=torch.int32),
            positions=torch.cat([torch.arange(cached, cached + new) for cached, new in lengths]).int(),
            query_starts=torch.tensor([0, *(new for _, new in lengths)]).cumsum(0).int(),
            context_lens=torch.tensor([cached + new for cached, new in lengths]).int(),
            stream_tables=((torch.full((sum(counts),), ~0, dtype=torch.int32),),),
            table_starts=(torch.tensor([0, *counts]).cumsum(0).int(),),
        )
        (group,) = decoder.kv_groups
        hidden = decoder.forward(batch, [torch.zeros(group.layer_block_bytes, dtype=torch.uint8)])
        decoder.logits(hidden[1:])
    report(warm, noted)


def report(warm: set[tuple[str, str]], noted: set[tuple[str, str]]) -> None:
    for name, _ in sorted(noted - warm):
        print(name)


def main(directory: Path) -> None:
    make_checkpoint(directory, "qwen3", **SHAPE)
    noted = note_instead_of_compiling()
    for vocab_size in (32_000, 151_669):  # the second is odd, so rows of its logits begin anywhere
        sample(vocab_size, noted)
    for block_size in (16, 128):
        forward(directory, block_size, noted)
    assert noted, "nothing was launched"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
