"""Compile the kernels for an H100, without one, as engines launch them; `test_triton_compiles` runs this program.

Every launch compiles and runs nothing. Prints the names of the compiled kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from swiftkv.engine.cuda_graphs import DecoderSteps
from swiftkv.engine.device_sampler import DeviceSampler
from swiftkv.engine.token_masks import TokenMasks
from swiftkv.engine.token_sampler import LogitRows
from swiftkv.kernels.dispatch import select_ops
from swiftkv.kernels.experts import SILU, Choices, ExpertLayer, ExpertWeights, GatedActivation
from swiftkv.kernels.triton_clock import _stamp
from swiftkv.kernels.triton_copy import move_blocks
from swiftkv.kernels.triton_ops import add_experts, pack_experts
from swiftkv.models.batch import ModelInput
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config
from swiftkv.models.stream import NO_STREAM
from tests.engine.test_sampler import make_request
from tests.support.checkpoints import make_checkpoint
from tests.support.offline_gpu import compile_instead_of_launching

VOCAB = 32_000
SHAPE = {"num_hidden_layers": 2, "head_dim": 128, "hidden_size": 256, "intermediate_size": 384}
PARAMS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 1},
    {"presence_penalty": 1.0, "logprobs": 3},
    {"logit_bias": {3: 1.0}, "min_tokens": 2},
]


def sample() -> None:
    sampler = DeviceSampler(VOCAB, torch.zeros(len(PARAMS), dtype=torch.int32))
    for slot, params in enumerate(PARAMS):
        sampler.seat(slot, make_request(slot, [1, 2, 3], **params))
    slots = np.arange(len(PARAMS), dtype=np.int32)
    masks = TokenMasks(slots[:1], np.zeros((1, VOCAB // 32), np.uint32))
    sampler.sample(LogitRows(torch.zeros(len(PARAMS), VOCAB), slots, np.full(len(PARAMS), 3, np.int32), masks)).result()


def forward(directory: Path, block_size: int) -> None:
    """Run a prompt, one after a history and a decoding sequence in one step; then a step as a graph captures it."""
    config = read_config(directory)
    ops = select_ops("cuda")
    decoder = load_decoder(config, MappedWeights(directory), torch.bfloat16, "cpu", 512, block_size, ops)
    (group,) = config.kv_groups(block_size, "bfloat16")
    lengths = [(0, 300), (496, 16), (4, 1)]
    counts = [-(-(cached + new) // block_size) for cached, new in lengths]
    pool = torch.zeros(sum(counts) * group.block_bytes, dtype=torch.uint8)
    batch = ModelInput(
        token_ids=torch.zeros(sum(new for _, new in lengths), dtype=torch.int32),
        positions=torch.cat([torch.arange(cached, cached + new) for cached, new in lengths]).int(),
        query_starts=torch.tensor([0, *(new for _, new in lengths)]).cumsum(0).int(),
        context_lens=torch.tensor([cached + new for cached, new in lengths]).int(),
        stream_tables=((torch.arange(sum(counts), dtype=torch.int32) * config.num_layers,),),
        table_starts=(torch.tensor([0, *counts]).cumsum(0).int(),),
    )
    decoder.forward(batch, [pool])
    decode = DecoderSteps(decoder, [pool], torch.zeros(4, dtype=torch.int32))
    decode.run(decode.inputs(4, num_entries=64, num_tables=1), NO_STREAM)


def multiply_by_experts() -> None:
    weights, bias = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    choices = Choices(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2))
    gpt_oss = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
    for activation, biases in ((SILU, (None,) * 3), (gpt_oss, (bias,) * 3)):
        experts = pack_experts(ExpertLayer(1, activation, [ExpertWeights(weights, weights, weights, *biases)]))
        add_experts(weights[:3], choices, experts, torch.zeros_like(weights[:3]))


def copy() -> None:
    lists = torch.tensor([2, 1, 0, 0, 0], dtype=torch.int64)
    for to_peer in (True, False):
        move_blocks(torch.zeros(1 << 16, dtype=torch.uint8), lists, 0, 1, 32 << 10, 0, to_peer, max_programs=8)
    _stamp[(1,)](torch.zeros(2, dtype=torch.int64), 1, num_warps=1)  # on the CPU `stamp` has a clock of its own


def main(directory: Path) -> None:
    make_checkpoint(directory, "qwen3", **SHAPE)
    compiled: set[str] = set()
    compile_instead_of_launching(lambda name, kernel: compiled.add(name))
    sample()
    for block_size in (16, 128):
        forward(directory, block_size)
    multiply_by_experts()
    copy()
    print(*sorted(compiled))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
