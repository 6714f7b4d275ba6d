"""The start of an engine on a GPU: measure how much memory is left for KV, and capture the CUDA graphs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from swiftkv.cache.geometry import blocks_for_tokens
from swiftkv.engine.memory import GRAPH_BYTES, kv_bytes_on_device, measure_use
from swiftkv.engine.token_counts import token_counts
from swiftkv.kernels.block_table import staged
from swiftkv.kernels.host_copies import upload
from swiftkv.models.batch import ModelInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swiftkv.cache.division import PoolDivision
    from swiftkv.engine.cuda_graphs import DecodeGraphs, DecodeInputs
    from swiftkv.engine.messages import EngineConfig
    from swiftkv.master.layer_stream import LayerStream
    from swiftkv.models.decoder import Decoder
    from swiftkv.transport.base import Transport

MAX_STREAMING_GRAPHS = 24
"""The most batch sizes to capture for steps that stream, for each number of buffers.

They are few because the copies make a capture several times as long. A step may then take a larger graph than it needs:
the unused rows cost little compared with the copies.
"""

log = logging.getLogger(__name__)


def size_pool(
    config: EngineConfig, model: Decoder, division: PoolDivision, device: torch.device, vocab_size: int
) -> int:
    """Return the bytes for the pool of an engine that has loaded its weights and has no pool yet.

    Call it in inference mode. `division` is how the pool will be divided.

    Raises `ConfigError`, which shows the sum, if the device has no room for it.
    """

    def steps() -> None:
        counts = token_counts(config.max_num_seqs, vocab_size, device)  # the first penalty allocates them
        run_largest_step(config, model, device)
        run_long_step(config, model, device)
        del counts

    use = measure_use(device, steps, 0 if config.enforce_eager else GRAPH_BYTES)
    # Lenders may hold a part of the longest sequence; `runner._check_room` checks that.
    wanted_tokens = config.block_size if config.lending is not None else config.max_model_len
    device_bytes = torch.cuda.get_device_properties(device).total_memory
    minimum_bytes = division.pool_bytes_for_tokens(wanted_tokens)
    kv_bytes = kv_bytes_on_device(config.memory, device_bytes, use, minimum_bytes)
    log.info("%s: %s + KV %.2f GiB of %.2f GiB", device, use, kv_bytes / 2**30, device_bytes / 2**30)
    return kv_bytes


def run_largest_step(config: EngineConfig, model: Decoder, device: torch.device) -> None:
    """Run the largest step that may come, and its logits, over blocks of garbage."""
    lengths = [config.max_model_len] * (config.max_num_batched_tokens // config.max_model_len)
    lengths += [rest] if (rest := config.max_num_batched_tokens % config.max_model_len) else []
    hidden = _run_step(config, model, device, [(0, length) for length in lengths])
    num_rows = min(config.max_num_seqs, len(hidden))
    logits = model.logits(hidden[:num_rows])
    logits.index_select(0, torch.arange(num_rows, device=device))  # sampling copies the raw logits before it edits them


def run_long_step(config: EngineConfig, model: Decoder, device: torch.device) -> None:
    """Run one token, and a prompt, after the longest history, to compile the kernels that split keys.

    `run_largest_step` may not launch these kernels.
    """
    from swiftkv.kernels.triton_schedule import MAX_DECODE_TOKENS

    longest = config.max_model_len
    num_new = (1, MAX_DECODE_TOKENS + 1)  # the second is one token more than a decode
    _run_step(config, model, device, [(longest - new, new) for new in num_new if new <= longest])


def _run_step(
    config: EngineConfig, model: Decoder, device: torch.device, lengths: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Run sequences of `lengths` (cached, new) tokens over one layer block of garbage; return the hidden states."""
    counts = [blocks_for_tokens(cached + new, config.block_size) for cached, new in lengths]
    tables = tuple(torch.full((sum(counts),), staged(0), dtype=torch.int32) for _ in model.kv_groups)
    batch = ModelInput(
        token_ids=upload(np.zeros(sum(new for _, new in lengths), np.int32), device),
        positions=torch.cat([torch.arange(cached, cached + new, dtype=torch.int32) for cached, new in lengths]),
        query_starts=_offsets([new for _, new in lengths]),
        context_lens=torch.tensor([cached + new for cached, new in lengths], dtype=torch.int32),
        stream_tables=(tables,),
        table_starts=tuple(_offsets(counts) for _ in model.kv_groups),
    )
    block_bytes = max(group.layer_block_bytes for group in model.kv_groups)
    pool = torch.zeros(block_bytes, dtype=torch.uint8, device=device)
    return model.forward(batch, [pool[: group.layer_block_bytes] for group in model.kv_groups])


def capture_graphs(
    config: EngineConfig, model: Decoder, regions: Sequence[torch.Tensor], last_token_ids: torch.Tensor
) -> DecodeGraphs[DecodeInputs] | None:
    """Capture decode steps that copy nothing, in inference mode, within `GRAPH_BYTES`.

    Returns `None` with `enforce_eager`.
    """
    if config.enforce_eager:
        return None
    from swiftkv.engine.cuda_graphs import DecodeGraphs, DecoderSteps, graph_sizes

    graphs = DecodeGraphs(DecoderSteps(model, regions, last_token_ids), last_token_ids.device)
    graphs.capture(graph_sizes(config.max_num_seqs), GRAPH_BYTES)
    log.info("%d CUDA graphs of decode steps, %.2f GiB", len(graphs.sizes()), graphs.nbytes / 2**30)
    return graphs


def capture_streaming(
    config: EngineConfig, graphs: DecodeGraphs[DecodeInputs], layer_stream: LayerStream, transport: Transport
) -> None:
    """Capture decode steps that copy borrowed KV over `transport`, in inference mode, in the rest of `GRAPH_BYTES`.

    Capture nothing unless kernels do the copies: a captured copy-engine transfer keeps its addresses, and a peer that
    is not mapped has no address.
    """
    from swiftkv.engine.cuda_graphs import graph_sizes
    from swiftkv.master.graph_stream import GraphStream
    from swiftkv.transport.peer import PeerTransport

    if config.lending is None or not isinstance(transport, PeerTransport) or transport.io_backend != "kernel":
        return
    sizes = graph_sizes(config.max_num_seqs, MAX_STREAMING_GRAPHS)
    for num_buffers in range(config.lending.stream_buffers, 0, -1):  # with one where there is no room for two
        stream = GraphStream(layer_stream, transport.mappings, num_buffers, max_programs=transport.max_programs)
        graphs.capture(sizes, GRAPH_BYTES, stream)
        num_graphs, gib = len(graphs.sizes(num_buffers)), graphs.nbytes / 2**30
        log.info("%d CUDA graphs of steps with %d stream buffers, %.2f GiB in all", num_graphs, num_buffers, gib)


def _offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
